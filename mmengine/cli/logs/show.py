"""`mmengine log show`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmengine.cli.logs.printing import Folder, Json, clean, console, existing, ms, print_json

if TYPE_CHECKING:
    from rich.table import Table

HELP = (
    "Show the requests of a log, or its steps.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log show run.log\n\n"
    "  mmengine log show run.log --steps --limit 100"
)


def show(
    folder: Folder,
    steps: Annotated[bool, typer.Option("--steps", help="One line a step, not one a request.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most lines shown; the last ones.")] = 40,
    json_output: Json = False,
) -> None:
    from collections import deque
    from dataclasses import asdict

    from mmengine.replay.show import request_lines, step_lines  # lazy: numpy

    lines = deque((step_lines if steps else request_lines)(existing(folder)), maxlen=limit)
    if json_output:
        for line in lines:
            print_json(asdict(line))
        return
    console().print(_step_table(lines) if steps else _request_table(lines))


def _request_table(lines: Any) -> "Table":
    from rich.table import Table

    table = Table(
        "request", "prompt", "media", "cached", "tokens", "preempted", "first ms", "total ms", "end"
    )
    for line in lines:
        end = line.finish_reason or "unfinished"
        table.add_row(
            clean(line.request_id),
            str(line.num_prompt_tokens),
            str(line.num_media),
            str(line.num_cached_tokens),
            str(line.num_output_tokens),
            str(line.num_preemptions),
            ms(line.first_token_ns),
            ms(line.end_ns),
            clean(f"{end}: {line.detail}" if line.detail else end),
        )
    return table


def _step_table(lines: Any) -> "Table":
    from rich.table import Table

    table = Table(
        "step",
        "rows",
        "tokens",
        "admitted",
        "encoded",
        "preempted",
        "running",
        "waiting",
        "free",
        "encoder",
        "ms",
        "",
    )
    for line in lines:
        counts = (
            line.step,
            line.num_rows,
            line.num_tokens,
            line.num_admitted,
            line.num_encoded,
            line.num_preempted,
            line.num_running,
            line.num_waiting,
            line.num_free_blocks,
            line.encoder_used,
        )
        table.add_row(*(str(count) for count in counts), f"{line.device_ms:.2f}", clean(line.failed))
    return table

"""`mmengine log`: check a log, or look into it. Needs neither a model nor torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmengine.errors import LogError

if TYPE_CHECKING:
    from rich.table import Table

    from mmengine.replay.verify import Divergence, VerifyReport

log_app = typer.Typer(
    help="Verify an event log, or show what is in it.", no_args_is_help=True, rich_markup_mode="rich"
)
Folder = Annotated[Path, typer.Argument(help="The folder that was given as --log.", show_default=False)]
MAX_SHOWN_CHARS = 300


@log_app.command(
    help="Derive every decision in a log again, and compare it with what was logged.\n\n"
    "Exit code 0 when all agree, 1 at the first divergence, which is named: step, event, field, logged "
    "and derived value.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log verify run.log"
)
def verify(
    folder: Folder,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from rich.console import Console  # lazy: help needs none of it

    from mmengine.replay.verify import verify as verify_log

    report = verify_log(_existing(folder))
    if json_output:
        _print_json(_report_json(report))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in report_lines(report):
            console.print(line, markup=False)
    raise typer.Exit(0 if report.ok else 1)


@log_app.command()
def show(
    folder: Folder,
    steps: Annotated[bool, typer.Option("--steps", help="One line a step, not one a request.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most lines shown; the last ones.")] = 40,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Show the requests of a log, or its steps.

    [bold]Examples[/bold]

      mmengine log show run.log

      mmengine log show run.log --steps --limit 100
    """
    from collections import deque
    from dataclasses import asdict

    from mmengine.replay.show import request_lines, step_lines  # lazy: numpy

    lines = deque((step_lines if steps else request_lines)(_existing(folder)), maxlen=limit)
    if json_output:
        for line in lines:
            _print_json(asdict(line))
        return
    from rich.console import Console

    # A pipe has no width of its own, and a table cut to 80 columns would be of no use there.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(_step_table(lines) if steps else _request_table(lines))


def report_lines(report: "VerifyReport") -> list[str]:
    """What `verify` found, in words."""
    lines = [
        f"{report.steps} steps, {report.events} events, {report.requests} requests, {report.tokens} tokens, "
        f"{report.checkpoints} state digests"
    ]
    if report.torn is not None:
        lines.append(
            f"torn tail: {report.torn.num_bytes} bytes at the end of {report.torn.path.name} are no whole "
            "record; a write was cut short"
        )
    if report.unfinished:
        lines.append(f"{len(report.unfinished)} requests have no end in this log")
    if not report.rederived:
        lines.append(
            f"written under the rules of decision version {report.logged_version}, which this version does "
            "not have: folded and digests compared, decisions not derived again"
        )
    if report.divergence is not None:
        return [*lines, *_divergence_lines(report.divergence)]
    return [*lines, "verified: no divergence" if report.rederived else "folded: no divergence"]


def _divergence_lines(found: "Divergence") -> list[str]:
    lines = [
        f"DIVERGED at step {found.step}, record {found.sequence}: {found.event}, field {found.field}",
        f"  logged   {_short(found.logged)}",
        f"  derived  {_short(found.derived)}",
        "  observations before it:",
    ]
    return lines + [f"    {r.sequence:>8}  step {r.step}  {_short(r.event, 120)}" for r in found.recent]


def _report_json(report: "VerifyReport") -> dict[str, Any]:
    found = report.divergence
    return {
        "ok": report.ok,
        "rederived": report.rederived,
        "steps": report.steps,
        "events": report.events,
        "requests": report.requests,
        "tokens": report.tokens,
        "torn_bytes": report.torn.num_bytes if report.torn is not None else 0,
        "unfinished": report.unfinished,
        "divergence": None
        if found is None
        else {
            "sequence": found.sequence,
            "step": found.step,
            "event": found.event,
            "field": found.field,
            "logged": _short(found.logged),
            "derived": _short(found.derived),
        },
    }


def _request_table(lines: Any) -> "Table":
    from rich.table import Table

    table = Table(
        "request", "prompt", "media", "cached", "tokens", "preempted", "first ms", "total ms", "end"
    )
    for line in lines:
        end = line.finish_reason or "unfinished"
        table.add_row(
            _clean(line.request_id),
            str(line.num_prompt_tokens),
            str(line.num_media),
            str(line.num_cached_tokens),
            str(line.num_output_tokens),
            str(line.num_preemptions),
            _ms(line.first_token_ns),
            _ms(line.end_ns),
            _clean(f"{end}: {line.detail}" if line.detail else end),
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
        table.add_row(*(str(count) for count in counts), f"{line.device_ms:.2f}", _clean(line.failed))
    return table


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise LogError(f"there is no folder {folder}; give the one that was named as --log")
    return folder


def _ms(nanoseconds: int) -> str:
    return "" if nanoseconds < 0 else f"{nanoseconds / 1e6:.1f}"


def _clean(text: str) -> str:
    """Text of a log, which may come from anybody, without what rich or a terminal would act on."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "\ufffd" for c in text[:MAX_SHOWN_CHARS]))


def _short(value: Any, most: int = MAX_SHOWN_CHARS) -> str:
    text = "".join(c if c.isprintable() else "\ufffd" for c in repr(value)[: most + 1])
    return text if len(text) <= most else f"{text[:most]}…"


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value))

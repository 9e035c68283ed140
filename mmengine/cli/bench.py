"""`mmengine bench serve`: how a server bears a load."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mmengine.cli.commands import Command, Group
from mmengine.errors import ConfigError

HELP = """Measure a server that speaks OpenAI's chat API, this one or another.

[bold]Examples[/bold]

  mmengine bench serve                                         64 calls, 16 at a time, to 127.0.0.1:8000

  mmengine bench serve --rate 4 --ttft-ms 500 --tpot-ms 50     how many of them are good enough

  mmengine bench serve --image photo.jpg --picture bench.png

Each call has a prompt of its own, so that no cache has it, and streams. Times are those of this client: run
it beside the server, and not on its cores where it matters.
"""
Images = Annotated[
    list[Path] | None,
    typer.Option(metavar="PATH", help="A file to ask about; may be repeated, they take turns."),
]
bench_app = typer.Typer(cls=Group, help="Measure what runs.", no_args_is_help=True, rich_markup_mode="rich")


@bench_app.callback()
def bench() -> None:
    """Measure what runs."""


@bench_app.command(cls=Command, help=HELP)
def serve(
    url: Annotated[str, typer.Option(help="Of the server, with /v1.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="By which name it is asked for.", show_default="its first")] = "",
    api_key: Annotated[str, typer.Option(envvar="MMENGINE_API_KEY", help="Its key.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Calls.")] = 64,
    rate: Annotated[
        float, typer.Option(min=0.001, help="Calls a second.", show_default="as one place is free")
    ] = math.inf,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls that are open at once.")] = 16,
    prompt_words: Annotated[int, typer.Option(min=1, help="Of a prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of an answer.")] = 64,
    ends: Annotated[bool, typer.Option("--ends", help="Answers may end before that.")] = False,
    image: Images = None,
    ttft_ms: Annotated[float, typer.Option(min=0, help="A good call has its first token by then.")] = 0.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="And a token each so often behind it.")] = 0.0,
    timeout_s: Annotated[float, typer.Option(min=1, max=86400, help="Of one call.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts, and of when calls come.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the table here, as markdown.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the times into this file.")] = None,
) -> None:
    import asyncio  # lazy, as the others: help is instant, and the supervisor of a server stays small

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from mmengine.cli.pictures import check_picture
    from mmengine.server.bench.calling import Target
    from mmengine.server.bench.load import Load, run
    from mmengine.server.bench.summary import Limits, draw, markdown, rows_of, summary_of

    if picture is not None:
        check_picture(picture, "--picture")
    for path in image or ():
        if not path.is_file():
            raise ConfigError(f"--image {path} is no file")
    target, limits = Target.of(url, api_key), Limits(ttft_ms, tpot_ms)
    load = Load(
        requests,
        rate,
        concurrency,
        prompt_words,
        max_tokens,
        model,
        tuple(image or ()),
        seed,
        timeout_s,
        not ends,
    )
    load.check()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calls", total=requests)
        calls, seconds = asyncio.run(run(target, load, lambda: progress.advance(task)))
    summary = summary_of(calls, seconds, limits)
    title = f"{url}: {requests} calls of {prompt_words} words and {max_tokens} tokens"
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows_of(summary):
        table.add_row(*row)
    Console(highlight=False, soft_wrap=True).print(table)
    if out is not None:
        out.write_text(markdown(title, summary), encoding="utf-8")
    if as_json is not None:
        as_json.write_text(json.dumps(asdict(summary), indent=1), encoding="utf-8")
    if picture is not None:
        draw(title, calls, limits, picture)
    if summary.num_failed == summary.num_calls:
        raise ConfigError(f"no call was answered: {next(iter(summary.errors))}")

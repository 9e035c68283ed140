"""`mmengine bench serve`: measures the throughput and latencies of a server under load."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mmengine.cli.commands import Command, Group
from mmengine.errors import ConfigError

HELP = """Measure a server that has OpenAI's chat API. It need not be mmengine.

[bold]Examples[/bold]

  mmengine bench serve                                         64 calls, 16 at a time, to 127.0.0.1:8000

  mmengine bench serve --rate 4 --ttft-ms 500 --tpot-ms 50     also count calls within these limits

  mmengine bench serve --image photo.jpg --picture bench.png

Each call streams, and has a unique prompt that no cache contains. This client measures the times. Run the
client near the server, but on other cores.
"""
Images = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH", help="Image for the prompts; may be repeated, then prompts take the images in turn."
    ),
]
bench_app = typer.Typer(
    cls=Group, help="Measure running servers.", no_args_is_help=True, rich_markup_mode="rich"
)


@bench_app.callback()
def bench() -> None:
    """Measure running servers."""


@bench_app.command(cls=Command, help=HELP)
def serve(
    url: Annotated[str, typer.Option(help="Server's URL, with /v1.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="Model name.", show_default="the server's first")] = "",
    api_key: Annotated[str, typer.Option(envvar="MMENGINE_API_KEY", help="API key.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Number of calls.")] = 64,
    rate: Annotated[
        float, typer.Option(min=0.001, help="Calls per second.", show_default="as soon as a place is free")
    ] = math.inf,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent calls.")] = 16,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words per prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum tokens per answer.")] = 64,
    ends: Annotated[bool, typer.Option("--ends", help="Allow answers to end earlier.")] = False,
    image: Images = None,
    ttft_ms: Annotated[
        float, typer.Option(min=0, help="Time limit for a good call's first token in ms.")
    ] = 0.0,
    tpot_ms: Annotated[
        float, typer.Option(min=0, help="Time limit per further token of a good call in ms.")
    ] = 0.0,
    timeout_s: Annotated[float, typer.Option(min=1, max=86400, help="Timeout per call in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed for prompts and arrival times.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output file for the table, as Markdown.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Output file for the figures, as JSON.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Output file for a picture of the times.")] = None,
) -> None:
    import asyncio  # All imports here are lazy, for fast help and a small supervisor process.

    from mmengine.cli.progress_bar import progress_bar
    from mmengine.server.bench.load import Load, run
    from mmengine.server.bench.streamed_call import Target
    from mmengine.server.bench.summary import Limits, draw, markdown, rows_of, summary_of

    _check_files(image or (), picture)
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
    with progress_bar("calls", requests) as bar:
        calls, seconds = asyncio.run(run(target, load, bar.advance))
    summary = summary_of(calls, seconds, limits)
    title = f"{url}: {requests} calls of {prompt_words} words and {max_tokens} tokens"
    _print_table(title, rows_of(summary))
    if out is not None:
        out.write_text(markdown(title, summary), encoding="utf-8")
    if as_json is not None:
        as_json.write_text(json.dumps(asdict(summary), indent=1), encoding="utf-8")
    if picture is not None:
        draw(title, calls, limits, picture)
    if summary.num_failed == summary.num_calls:
        raise ConfigError(f"no call was answered: {next(iter(summary.errors))}")


def _check_files(images: Iterable[Path], picture: Path | None) -> None:
    from mmengine.cli.pictures import check_picture  # Lazy import.

    if picture is not None:
        check_picture(picture, "--picture")
    for path in images:
        if not path.is_file():
            raise ConfigError(f"--image {path} is not a file")


def _print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    from rich.console import Console  # Lazy import.
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, soft_wrap=True).print(table)

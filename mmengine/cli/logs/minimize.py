"""`mmengine log minimize`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmengine.cli.logs.printing import Folder, Json, existing, print_json

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.replay.minimize.failures import Failure
    from mmengine.replay.minimize.minimize import Minimizer, Progress

HELP = (
    "Make a failing log small: leave out requests, then shrink values, while it fails in the same way.\n\n"
    "Writes the smallest log and a pytest file that replays it. FAILING is a kind of failure (any, encoder, "
    "media, references, blocks, host_blocks, rows, queue, budgets, computed, flights, stalled, thrash, "
    "crash, tokens, divergence), or a command that fails on a log; {} in it stands for the log's folder.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log minimize night.log --failing any -o small\n\n"
    "  mmengine log minimize night.log --failing 'python check.py {}' -o small"
)


def minimize(
    folder: Folder,
    failing: Annotated[str, typer.Option(help="A kind of failure, or a command.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A new folder for the log and the test.", show_default=False)
    ],
    settings: Annotated[
        bool, typer.Option("--settings", help="Shrink settings too: the pool, budgets, rows.")
    ] = False,
    seconds: Annotated[int, typer.Option(min=1, help="Stop looking for a smaller log after so long.")] = 600,
    json_output: Json = False,
) -> None:
    from time import monotonic

    from mmengine.replay.minimize.failures import (  # lazy, like all below: help needs none of it
        KINDS,
        find_failure,
    )
    from mmengine.replay.minimize.minimize import Minimizer
    from mmengine.replay.minimize.reproduction import Command, reproduce
    from mmengine.replay.rerun.script import read_script

    command = None if failing in KINDS else Command(failing)
    script = read_script(existing(folder))

    def probe(candidate: Any, max_steps: int) -> "Failure | None":
        if command is not None:
            return command.of_script(candidate, max_steps)
        return find_failure(candidate, failing, max_steps=max_steps)

    begin = monotonic()
    with _progress() as progress:
        minimizer = Minimizer(script, probe, is_over=lambda: monotonic() - begin > seconds, progress=progress)
        first = minimizer.failure
        small = minimizer.minimize(settings=settings)
    test = reproduce(small, minimizer.failure, command or failing, out, len(script.requests))
    _print(minimizer, first, len(script.requests), test, monotonic() - begin, json_output)


def _print(
    minimizer: "Minimizer", first: "Failure", before: int, test: Path, seconds: float, json_output: bool
) -> None:
    after = len(minimizer.best.requests)
    tokens = sum(len(event.prompt) // 4 for event in minimizer.best.requests)
    if json_output:
        print_json(
            {
                "failure": minimizer.failure.kind,
                "what": minimizer.failure.what,
                "step": minimizer.failure.step,
                "requests_before": before,
                "requests": after,
                "prompt_tokens": tokens,
                "candidates": minimizer.tried,
                "seconds": round(seconds, 1),
                "log": str(test.with_name("log")),
                "test": str(test),
            }
        )
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for line in (
        f"the log fails: {first}",
        f"{before} requests became {after}, with {tokens} prompt tokens",
        f"the failure is now {minimizer.failure}",
        f"{minimizer.tried} candidates in {seconds:.1f} s",
        f"wrote {test.with_name('log')} and {test}",
    ):
        console.print(line, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[["Progress"], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("reading the log", total=1)
        whole = 0

        def tell(now: "Progress") -> None:
            nonlocal whole
            whole = whole or now.num_requests
            text = f"{now.phase}: {now.num_requests} requests, {now.num_tokens} tokens, {now.tried} tried"
            bar.update(task, description=text, total=whole, completed=whole - now.num_requests)

        yield tell

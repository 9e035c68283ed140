"""`mmengine log minimize`: reduces a failing log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.logs.printing import Folder, Json, existing, print_json
from mmengine.errors import MMEngineError, code_of

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.minimize.command_probe import Main
    from mmengine.replay.minimize.deadline import Deadline
    from mmengine.replay.minimize.failures import Failure
    from mmengine.replay.minimize.minimize import Minimizer, Progress
    from mmengine.replay.minimize.probe import Probe

HELP = (
    "Reduce a failing log: leave out requests, then shrink values, while it fails in the same way.\n\n"
    "Writes the smallest log and a pytest file that replays it. FAILING is a kind of failure (any; "
    "an invariant's name, such as budgets or hits; stalled, thrash, crash, tokens, divergence), or a command "
    "that fails on a log, with {} for the log's folder. With --against the log fails when another build of "
    "mmengine decides differently on the same requests.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log minimize night.log --failing any -o small\n\n"
    "  mmengine log minimize night.log --failing 'python check.py {}' -o small\n\n"
    "  mmengine log minimize night.log --against ~/last-release/.venv -o small"
)


def minimize(
    context: typer.Context,
    folder: Folder,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="New folder for the log and the test.", show_default=False)
    ],
    failing: Annotated[str, typer.Option(help="Kind of failure, or a command.", show_default=False)] = "",
    against: Annotated[
        str,
        typer.Option(
            help="Another build: a Python, a virtual environment, or a checkout.", show_default=False
        ),
    ] = "",
    settings: Annotated[
        bool, typer.Option("--settings", help="Also shrink settings: the pool, budgets, rows.")
    ] = False,
    seconds: Annotated[
        int, typer.Option(min=1, help="Time limit in seconds; then the smallest log so far is written.")
    ] = 600,
    json_output: Json = False,
) -> None:
    from mmengine.replay.minimize.deadline import Deadline  # Lazy, like all below: help needs none of them.
    from mmengine.replay.minimize.minimize import Minimizer
    from mmengine.replay.minimize.probe import KindProbe
    from mmengine.replay.minimize.reproduction import refuse_used, reproduce
    from mmengine.replay.rerun.script import read_script

    deadline = Deadline(seconds)
    with _probe(failing, against, deadline, _main_of(context)) as probe, _progress() as progress:
        refuse_used(out)
        script = read_script(existing(folder), lambda state, record: deadline.check())
        minimizer = Minimizer(script, probe.of_script, deadline=deadline, progress=progress)
        first = minimizer.failure
        if isinstance(probe, KindProbe):
            probe.check_kind(first)
        small = minimizer.minimize(settings=settings)
        test = reproduce(small, minimizer.failure, probe, out, len(script.requests))
    _print(minimizer, first, len(script.requests), test, deadline, json_output)


@contextmanager
def _probe(failing: str, against: str, deadline: "Deadline", main: "Main") -> "Iterator[Probe]":
    """Yield the probe that detects the failure."""
    from mmengine.replay.minimize.build_probe import BuildProbe
    from mmengine.replay.minimize.command_probe import CommandProbe
    from mmengine.replay.minimize.failures import KINDS
    from mmengine.replay.minimize.probe import KindProbe

    if bool(failing) == bool(against):
        raise typer.BadParameter("give exactly one of the two", param_hint="--failing / --against")
    if against:
        with BuildProbe(against, deadline) as other:
            yield other
    else:
        yield KindProbe(failing, deadline) if failing in KINDS else CommandProbe(failing, deadline, main)


def _main_of(context: typer.Context) -> "Main":
    """Return a function that runs the current program with other arguments and returns its exit code."""
    program = context.find_root().command

    def main(arguments: list[str]) -> int:
        try:
            program.main(arguments, prog_name="mmengine")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except MMEngineError as error:
            print(f"mmengine: {error}", file=sys.stderr)
            return code_of(error)
        return 0

    return main


def _print(
    minimizer: "Minimizer", first: "Failure", before: int, test: Path, deadline: "Deadline", json_output: bool
) -> None:
    seconds = deadline.passed()
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
                "cut_short": minimizer.is_cut_short,
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
    if minimizer.is_cut_short:
        text = f"the limit of {deadline.seconds:g} seconds passed before the search ended; raise --seconds"
        console.print(text, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[["Progress"], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(file=sys.stderr)  # A command in this process temporarily replaces sys.stderr.
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

"""`mmengine log debug`: a debugger for logs, in the terminal."""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, clean, console, existing, printable

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from rich.console import Console

    from mmengine.replay.debug.commands.session import Session
    from mmengine.replay.debug.views import Block

HELP = (
    "Debug a log: step forward and back, stop at conditions, and inspect the state.\n\n"
    "The commands are those of gdb and rr where they have them: step, reverse-step, break, watch, continue, "
    "reverse-continue, info. help lists them.\n\n"
    "With two logs, such as those of a good and a bad build, continue stops at their first difference; "
    "help align explains the commands for both.\n\n"
    "--web shows the debugger in a browser; mmengine log report --debug writes a small log as a page.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log debug run.log\n\n"
    "  mmengine log debug good.log bad.log --ex continue\n\n"
    '  mmengine log debug run.log --ex "break preempted" --ex continue --ex "info queue"'
)
PROMPT = "(mm) "
FAILED = 1  # Exit code if a command in a script fails.


def debug(
    folder: Folder,
    other: Annotated[
        Path | None,
        typer.Argument(help="Folder of a second log, to debug both side by side.", show_default=False),
    ] = None,
    script: Annotated[
        list[Path] | None,
        typer.Option(
            "--command", "-x", help="File with a command per line; may be repeated.", metavar="FILE"
        ),
    ] = None,
    execute: Annotated[
        list[str] | None,
        typer.Option("--ex", "-e", help="Command, run after the files; may be repeated.", metavar="COMMAND"),
    ] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Exit after these commands.")] = False,
    web: Annotated[
        bool,
        typer.Option("--web", help="After the commands, show the debugger in a browser, on 127.0.0.1."),
    ] = False,
    port: Annotated[int, typer.Option(help="Port for --web (default: a free one).", min=0, max=65535)] = 0,
) -> None:
    from mmengine.paused_collection import paused_collection  # Lazy, like the imports below, for fast help.
    from mmengine.replay.debug import open_debugger
    from mmengine.replay.debug.commands.session import Session
    from mmengine.simulation.bounded_files import existing as existing_file
    from mmengine.simulation.bounded_files import lines

    commands = [
        line.decode(errors="replace") for path in script or () for _, line in lines(existing_file(path), None)
    ]
    commands += execute or []
    is_batch = batch or bool(commands) and not sys.stdin.isatty()
    progress = _Progress()
    with reported(existing(folder)) as findings:
        # Garbage collection would traverse a state's many objects, which can take longer than a command.
        with paused_collection():
            debugger, second = open_debugger(folder, findings, progress=progress), None
            if other is not None:
                second = open_debugger(existing(other), progress=progress)
                second.can_evaluate = not web
            debugger.can_evaluate = not web
            session, out, is_done = Session(debugger, second), console(), False
            progress.stop()
        try:
            with paused_collection():
                is_done = _run_script(session, commands, out, progress)
                goes_on = is_done and not session.is_over
                if goes_on and not web and not is_batch:
                    _converse(session, out, progress)
            if goes_on and web:
                progress.close()
                _serve(session, [folder] if other is None else [folder, other], port)
        finally:
            progress.close()
            for each in (debugger, second):
                if each is not None:
                    each.navigator.keep()
    if not is_done:
        raise typer.Exit(FAILED)


def _serve(session: "Session", folders: list[Path], port: int) -> None:
    """Serve the debugger as a web page until Ctrl-C. `folders`: one or two logs."""
    from mmengine.server.debug.serve import serve_debugger

    def tell(address: str) -> None:
        print(f"the debugger of {' and '.join(map(str, folders))}: {address}", flush=True)
        print("The address is a secret; Ctrl-C ends the debugger.", flush=True)

    serve_debugger(session, " and ".join(folder.resolve().name for folder in folders), port, tell)


def _run_script(session: "Session", lines: list[str], out: "Console", progress: "_Progress") -> bool:
    """Run a script up to the first command that fails. Return whether all commands succeeded."""
    for line in lines:
        out.print(f"{PROMPT}{printable(line.strip())}", markup=False, highlight=False, soft_wrap=True)
        blocks, error = session.try_run(line)
        progress.stop()
        print_blocks(blocks, out)
        if error:
            print(f"mmengine: {printable(error, 1000)}", file=sys.stderr)
            return False
        if session.is_over:
            return True
    return True


def _converse(session: "Session", out: "Console", progress: "_Progress") -> None:
    """Run typed commands until quit or the end of the input."""
    from mmengine.cli.logs.debug_prompt import prompts

    print_blocks(session.here("help explains the commands; quit ends the session"), out)
    for line in prompts(session, PROMPT if sys.stdin.isatty() else ""):
        try:
            blocks, error = session.try_run(line)
        except KeyboardInterrupt:
            for each in session.debuggers:
                each.navigator.reload()
            blocks, error = session.here("interrupted"), ""
        progress.stop()
        print_blocks(blocks, out)
        if error:
            out.print(printable(error, 1000), markup=False, highlight=False, soft_wrap=True)
        if session.is_over:
            return
        gc.collect()  # The user reads the output during the collection.


def print_blocks(blocks: "list[Block]", out: "Console") -> None:
    """Print texts and tables, without control characters and markup from the log."""
    from rich.table import Table as RichTable

    from mmengine.replay.debug.views import Text

    for block in blocks:
        if isinstance(block, Text):
            for line in block.lines:
                out.print(printable(line, 2000), markup=False, highlight=False, soft_wrap=True)
            continue
        table = RichTable(title=clean(block.title), title_justify="left", title_style="bold")
        for name in block.header:
            table.add_column(clean(name), overflow="fold")
        for row in block.rows:
            table.add_row(*(clean(str(cell)) for cell in row))
        out.print(table)
        if block.note:
            out.print(printable(block.note, 2000), markup=False, highlight=False, soft_wrap=True)


class _Progress:
    """A line on the terminal that shows how far the log was read. `stop` hides the line before the prompt is
    shown; `close` hides the line for good.
    """

    def __init__(self) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._status = console.status("reading the log") if console.is_terminal else None

    def __call__(self, position: int) -> None:
        if self._status is not None and position:
            self._status.update(f"reading the log: record {position:,}")
            self._status.start()

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()

    def close(self) -> None:
        self.stop()
        self._status = None

"""`mmengine log report`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.logs import fleet
from mmengine.cli.logs.printing import Folder, Json, existing, print_json

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.events.codec import Record

HELP = (
    "Write a log as one page for a browser: a lane a request, memory and budgets over time, and for each "
    "step its batch and why the others waited.\n\n"
    "Of a folder of replicas' logs it is one page for all of them, which says where each request went, and a "
    "page beside it for each log.\n\n"
    "The page needs no network and asks for nothing.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log report run.log -o report.html"
)


def report(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.", show_default=False)],
    json_output: Json = False,
) -> None:
    from mmengine.replay.report import write_report  # lazy: numpy

    if fleet.is_fleet(existing(folder)):
        fleet.write_page(folder, out, json_output)
        return
    with _progress() as progress:
        num_steps, num_requests = write_report(existing(folder), out, progress)
    num_bytes = out.stat().st_size
    if json_output:
        counts = {"steps": num_steps, "requests": num_requests, "bytes": num_bytes}
        print_json({"page": str(out), **counts})
        return
    print(f"{out}: {num_steps} steps of {num_requests} requests, {num_bytes / 1e6:.1f} MB")


@contextmanager
def _progress() -> Iterator[Callable[["Record"], None]]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("reading the log")

        def tell(record: "Record") -> None:
            if record.sequence % 1024 == 0:
                bar.update(task, description=f"step {record.step}")

        yield tell

"""`mmengine log report`: writes a log as an HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.logs import fleet
from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, Json, existing, print_json
from mmengine.cli.progress_bar import progress_bar

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.events.codec import Record

HELP = (
    "Write a log as an HTML page: a lane per request, memory and budgets over time, and each step's batch "
    "with the reasons why other requests waited.\n\n"
    "For a folder of replicas' logs, write a page with each request's path, and a page for each log beside "
    "it.\n\n"
    "The page needs no network.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log report run.log -o report.html"
)


def report(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file.", show_default=False)],
    debug: Annotated[
        bool, typer.Option("--debug", help="Write the debugger of a small log as a page instead.")
    ] = False,
    json_output: Json = False,
) -> None:
    from mmengine.replay.report import write_report  # Lazy: numpy

    if debug:
        _write_debugger(existing(folder), out, json_output)
        return
    if fleet.is_fleet(existing(folder)):
        fleet.write_page(folder, out, json_output)
        return
    with reported(folder) as findings:
        with progress_bar("reading the log", count="") as bar:

            def show(record: "Record") -> None:
                if record.sequence % 1024 == 0:
                    bar.update(text=f"step {record.step}")

            counts = write_report(folder, out, show, findings)
        _print(out, *counts, json_output)


def _write_debugger(folder: Path, out: Path, json_output: bool) -> None:
    from mmengine.replay.debug.page.write import write_debug_page

    with reported(folder) as findings:
        count = write_debug_page(folder, out, findings)
    if json_output:
        print_json({"page": str(out), "records": count, "bytes": out.stat().st_size})
        return
    print(f"{out}: {count} records, {out.stat().st_size / 1e6:.1f} MB")


def _print(out: Path, num_steps: int, num_requests: int, json_output: bool) -> None:
    num_bytes = out.stat().st_size
    if json_output:
        counts = {"steps": num_steps, "requests": num_requests, "bytes": num_bytes}
        print_json({"page": str(out), **counts})
        return
    print(f"{out}: {num_steps} steps of {num_requests} requests, {num_bytes / 1e6:.1f} MB")

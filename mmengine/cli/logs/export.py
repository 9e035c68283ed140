"""`mmengine log export`: converts a log to other programs' formats."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, existing
from mmengine.errors import InvalidRequest

HELP = (
    "Write a log in a format for other programs.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  mmengine log export run.log --perfetto -o run.json     for https://ui.perfetto.dev\n\n"
    "  mmengine log export run.log --mooncake -o trace.jsonl  for mmengine simulate --format mooncake\n\n"
    "  mmengine log export run.log --csv -o requests.csv      with --steps: a line per step"
)


def export(
    folder: Folder,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="Write a Chrome trace (JSON).")] = False,
    mooncake: Annotated[
        bool, typer.Option("--mooncake", help="Write a trace with lengths and prefixes.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Write a table with a line per request.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="With --csv: write a line per step.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output file (default: standard output).")
    ] = None,
) -> None:
    from mmengine.replay.convert.export import csv_lines, mooncake_lines  # Lazy: numpy
    from mmengine.replay.convert.perfetto import perfetto_lines

    if perfetto + mooncake + csv != 1 or steps and not csv:
        raise InvalidRequest("choose one of --perfetto, --mooncake and --csv; --steps goes with --csv")
    existing(folder)
    with reported(folder) as findings:
        if perfetto:
            lines = perfetto_lines(folder, findings)
        elif mooncake:
            lines = mooncake_lines(folder, findings)
        else:
            lines = csv_lines(folder, steps=steps, findings=findings)
        if out is None:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            return
        with out.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

"""Tables for the screen and for a file, and the one JSON line."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata

from rich.console import Console
from rich.table import Table as RichTable

PACKAGES = ("torch", "transformers", "numpy", "tokenizers")
MIN_WIDTH = 120


@dataclass(slots=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def machine_lines(threads: int) -> list[str]:
    """What the figures belong to."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = f"{os.cpu_count()} cores of which {usable} usable, {threads} thread(s)"
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in PACKAGES)]
    return [
        f"{date.today()}, {cpu_model()}, {cores}, load average {load:.1f} at the end",
        ", ".join(versions),
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def show(tables: Sequence[Table], lines: Sequence[str]) -> None:
    console = Console()
    if console.width < MIN_WIDTH:
        console = Console(width=MIN_WIDTH)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left", title_style="bold")
        for place, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if place else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
        for note in table.notes:
            console.print(note, markup=False, highlight=False)
        console.print()
    for line in lines:
        console.print(line, markup=False, highlight=False)


def markdown(title: str, tables: Sequence[Table], lines: Sequence[str]) -> str:
    parts = [f"# {title}", *lines]
    for table in tables:
        cells = [list(table.columns), ["---", *["---:"] * (len(table.columns) - 1)], *map(list, table.rows)]
        parts.append(f"## {table.title}")
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
        parts.extend(table.notes)
    return "\n\n".join(parts) + "\n"


def target(measured: float, bar: float, *, exactly: bool = False) -> dict[str, float | bool]:
    met = measured == bar if exactly else measured >= bar
    return {"measured": round(measured, 3), "bar": bar, "met": met}


def target_line(targets: dict[str, dict[str, float | bool]]) -> str:
    return json.dumps({"targets": targets})

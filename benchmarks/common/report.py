"""Prints tables, writes them as Markdown files, and prints the final JSON line with the targets."""

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

PACKAGES = ("torch", "transformers", "numpy", "tokenizers")
MIN_WIDTH = 120


@dataclass(slots=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Target:
    """A measured figure and its target. `bar`: the smallest value that meets the target, or the largest if
    `most` is set. `stretch`: a more ambitious bar.
    """

    name: str
    measured: float
    bar: float
    stretch: float | None = None
    most: bool = False

    def reaches(self, bar: float | None) -> bool:
        if bar is None:
            return False
        return self.measured <= bar if self.most else self.measured >= bar


@dataclass(slots=True)
class Part:
    """Tables and targets from one section of a benchmark."""

    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def add(self, other: "Part") -> None:
        self.tables += other.tables
        self.targets += other.targets

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Part":
        found = json.loads(text)
        tables = [Table(**table) for table in found["tables"]]
        for table in tables:
            table.rows = [tuple(row) for row in table.rows]  # JSON has no tuples.
        return cls(tables, [Target(**each) for each in found["targets"]])


def target_table(targets: Iterable[Target]) -> Table:
    table = Table("Targets", ("", "measured", "wanted", "met", "stretch", "stretch met"))
    for each in targets:
        word = "at most" if each.most else "at least"
        stretch = (
            ("", "") if each.stretch is None else (f"{each.stretch:g}", _yes(each.reaches(each.stretch)))
        )
        met = _yes(each.reaches(each.bar))
        table.rows.append((each.name, f"{each.measured:.3g}", f"{word} {each.bar:.3g}", met, *stretch))
    return table


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def machine_lines(threads: int) -> list[str]:
    """Return lines that describe the machine, its load and the package versions."""
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
            # A library's message may look like rich's markup.
            shown.add_row(*map(Text, row))
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


def target_line(targets: dict[str, dict[str, float | bool]]) -> str:
    return json.dumps({"targets": targets})


def target_dicts(targets: Iterable[Target]) -> dict[str, dict[str, float | bool]]:
    """Return the argument for `target_line`: a dict from each target's name to its results."""
    return {
        each.name: {"measured": round(each.measured, 3), "bar": each.bar, "met": each.reaches(each.bar)}
        for each in targets
    }


def finish(
    title: str,
    tables: Sequence[Table],
    targets: Sequence[Target],
    options: argparse.Namespace,
    more_facts: Sequence[str] = (),
) -> None:
    """Print a benchmark's tables and its missed targets. The benchmark must have run on a single thread,
    because the output names one thread.

    `options.out`: a Markdown file for the tables, or None. `options.json`: whether to print the targets as a
    JSON line too.
    """
    facts = [*machine_lines(threads=1), *more_facts]
    show([*tables, target_table(targets)], facts)
    missed = [target.name for target in targets if not target.reaches(target.bar)]
    print("MISSED: " + "; ".join(missed) if missed else "All targets are met.")
    if options.out:
        options.out.write_text(markdown(title, [target_table(targets), *tables], facts))
    if options.json:
        print(target_line(target_dicts(targets)))

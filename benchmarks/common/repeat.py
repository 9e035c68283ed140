"""Combines several runs of a benchmark into medians, and computes confidence intervals."""

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np

from benchmarks.common.report import Part, Table

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def medians(parts: Sequence[Part]) -> Part:
    """Return a Part with the median over all runs in each numeric cell. For an even number of runs, the
    median is the lower of the two middle values.

    Other cells and titles come from the first run. The notes of all runs are combined without duplicates.
    """
    tables = [_table(versions) for versions in zip(*(part.tables for part in parts), strict=True)]
    targets = [
        replace(versions[0], measured=median_low(each.measured for each in versions))
        for versions in zip(*(part.targets for part in parts), strict=True)
    ]
    return Part(tables, targets)


def _table(versions: Sequence[Table]) -> Table:
    first = versions[0]
    rows = [
        tuple(_cell(cells) for cells in zip(*rows, strict=True))
        for rows in zip(*(table.rows for table in versions), strict=True)
    ]
    notes = list(dict.fromkeys(note for table in versions for note in table.notes))
    notes.append(f"Each figure is its own median over {len(versions)} runs.")
    return Table(first.title, first.columns, rows, notes)


def _cell(cells: Sequence[str]) -> str:
    found = [NUMBER.match(cell) for cell in cells]
    if not all(found):
        return cells[0]
    return median_low(zip((float(match.group()) for match in found), cells, strict=True))[1]


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, low, high): the median, and its 95 % confidence interval by bootstrap."""
    ratios = np.array(ratios)
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)

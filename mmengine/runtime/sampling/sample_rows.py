"""Describes the positions at which rows sample in a step. With drafts, a row may sample at several
positions.
"""

import msgspec
import numpy as np

from mmengine.ragged import NO_PLACE, counting
from mmengine.runtime.rows import HISTORY, PENALTIES, RowColumns
from mmengine.runtime.sampling.penalties import DraftPairs
from mmengine.runtime.sampling.runs import Runs


class SampleRows(msgspec.Struct, frozen=True, eq=False):
    """The s positions at which rows sample in a step. `in_runs`: whether rows have drafts, so that a row may
    have several positions.

    `rows`: row numbers. `columns`: the rows' records (rows.COLUMNS). `output_index`: the index of the sampled
    token in the row's output, from 0. `wanted`: the option flags (column "options") of all rows, joined by
    bitwise or. `drafted`: the drafts that precede each position, if rows have penalties. `follows` (int32
    [s]): the draft after each position, if a row has the option flag HISTORY.
    """

    rows: np.ndarray
    columns: np.ndarray
    output_index: np.ndarray
    wanted: int
    in_runs: bool = False
    drafted: DraftPairs | None = None
    follows: np.ndarray | None = None

    @classmethod
    def of(
        cls, columns: RowColumns, rows: np.ndarray, num_known: np.ndarray, runs: Runs | None = None
    ) -> "SampleRows":
        """Return the sampling positions. `rows` [s]: each position's row. `num_known` [s]: the number of
        tokens in the row before each sampled token.
        """
        records = columns.of(rows)
        wanted = int(np.bitwise_or.reduce(records["options"]))
        drafted = None
        follows = runs.follows if runs is not None and wanted & HISTORY else None
        if runs is not None and wanted & PENALTIES:
            drafted = _drafted(runs, rows, np.flatnonzero(records["options"] & PENALTIES))
        output_index = num_known - records["num_prompt"]
        return cls(rows, records, output_index, wanted, runs is not None, drafted, follows)

    def take(self, selected: np.ndarray) -> "SampleRows":
        """Return only the positions `selected` (ascending indices)."""
        drafted = self.drafted
        if drafted is not None:
            position, *others = drafted.pairs
            place = np.searchsorted(selected, position)
            kept = np.append(selected, NO_PLACE)[place] == position
            drafted = DraftPairs(drafted.rows[kept], (place[kept], *(each[kept] for each in others)))
        return SampleRows(
            self.rows[selected],
            self.columns[selected],
            self.output_index[selected],
            self.wanted,
            self.in_runs,
            drafted,
            None if self.follows is None else self.follows[selected],
        )


def _drafted(runs: Runs, rows: np.ndarray, selected: np.ndarray) -> DraftPairs | None:
    """Return the drafts that precede each position of `selected` in its row, or None if there are no
    drafts.
    """
    depths = selected - runs.first[runs.row_of[selected]]
    if not depths.any():
        return None
    positions = np.repeat(selected, depths)
    tokens = runs.follows[positions - counting(depths) - 1].astype(np.int64)
    pairs, further = np.unique(np.stack((positions, tokens)), axis=1, return_counts=True)
    return DraftPairs(rows[pairs[0]].astype(np.intp), (pairs[0], pairs[1], further))

"""Which drafts go into the next step: each row's first drafter that has any."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmengine.core.executor import Admission
from mmengine.runtime.rows import RowColumns
from mmengine.spec_decode.base import Drafter


class Drafts(NamedTuple):
    """As StepResult has them: `token_ids` int32 [counts.sum()], row after row, `counts` int32 [s], and by
    number who made them, int32 [s]."""

    token_ids: np.ndarray
    counts: np.ndarray
    drafters: np.ndarray


class Drafting:
    """`drafters`: by number, the preferred ones first. A row has at most `most` drafts, and never more than
    its answer has room for."""

    def __init__(self, drafters: Sequence[Drafter], most: int, max_model_len: int, rows: RowColumns):
        self._drafters, self._most, self._rows = drafters, most, rows
        self._max_model_len = max_model_len
        # [drafter, row]: who follows whom.
        self._follows = np.zeros((len(drafters), len(rows.columns)), bool)

    def admit(self, admission: Admission) -> None:
        for number, drafter in enumerate(self._drafters):
            self._follows[number, admission.row] = drafter.admit(
                admission.row, admission.request, admission.token_ids
            )

    def drafts(self, rows: np.ndarray, num_known: np.ndarray, said: Sequence[list[int]]) -> Drafts | None:
        """Of s rows that go on: `num_known` [s] tokens that each has, of which it `said` the last in this
        step. None where nobody has drafts."""
        follows = self._follows[:, rows]
        if not follows.any():
            return None
        room = np.minimum(self._rows.columns["max_total"][rows], self._max_model_len) - num_known - 1
        most = np.clip(room, 0, self._most)
        counts, drafters = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
        found: dict[int, Sequence[int]] = {}
        for number, drafter in enumerate(self._drafters):
            picked = np.flatnonzero(follows[number]).tolist()
            texts = drafter.propose(rows[picked].tolist(), [said[n] for n in picked], most[picked].tolist())
            for place, drafts in zip(picked, texts, strict=True):
                if len(drafts) and place not in found:
                    found[place] = drafts
                    counts[place], drafters[place] = len(drafts), number
        if not found:
            return None
        flat = [token for place in sorted(found) for token in found[place]]
        return Drafts(np.array(flat, np.int32), counts, drafters)

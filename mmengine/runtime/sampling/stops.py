"""Finds sampled tokens that end an answer: end-of-sequence tokens, stop tokens, stop strings, and
repetitions.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mmengine.core.executor import CUT, REPETITION, REPETITION_CLOSED
from mmengine.request import Request
from mmengine.runtime.rows import REPETITION as DETECTS_REPETITION
from mmengine.runtime.rows import STOP_IDS, STOP_STRINGS, RowColumns
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.structured_output.rows.rows import Cut

EOS, TOKEN, STRING = "eos", "token", "string"
CLOSED = "closed"  # the kind of stop for an answer that was completed because its token budget ended
MAY_STOP = STOP_IDS | STOP_STRINGS | DETECTS_REPETITION
GRAMMAR_END = "grammar"  # the kind of stop if the grammar allows no further token
# Key in STRING_ENDS and REPETITION_ENDS: whether the grammar was complete before the stop string or the
# repetition.
STRING_ENDS = {True: STRING, False: CUT}

REPETITION_ENDS = {True: REPETITION_CLOSED, False: REPETITION}


class StopWatcher(Protocol):
    """Finds stop strings in rows' answers."""

    def admit(self, row: int, request: Request, token_ids: np.ndarray) -> None:
        """Assign `row` to `request`, which has stop strings. `token_ids`: int32, the prompt, and after a
        preemption also the earlier output tokens.
        """

    def feed(self, rows: np.ndarray, token_ids: np.ndarray) -> Sequence[int]:
        """Append a token to each row. `rows` and `token_ids`: int32 [s]. Returns the indices of rows in which
        a stop string is now complete, in ascending order. A row is returned at most once.
        """

    def cut(self, row: int) -> Cut | None:
        """Return the position at which a stop string ended the answer of `row`, or None. The row must have a
        grammar.
        """


def may_stop(token_ids: np.ndarray, batch: SampleRows, columns: RowColumns) -> bool:
    """Return whether `find_stops` could find a stop. Cheap, and False in most decode steps."""
    return bool(batch.wanted & MAY_STOP or np.count_nonzero(columns.is_eos(token_ids)))


def find_stops(
    token_ids: np.ndarray,
    batch: SampleRows,
    columns: RowColumns,
    watcher: StopWatcher | None,
) -> tuple[tuple[int, str], ...]:
    """Return (index, kind) for each sampling row whose token ends the answer.

    `token_ids`: int32 [s]; negative: no token. A row needs min_tokens tokens to stop, and min_stop_tokens
    tokens to stop at a stop string. If several kinds apply, the result has the first kind in this order: end
    of sequence, stop token, stop string, repetition.
    """
    options, wanted = batch.columns["options"], batch.wanted
    at_eos = columns.is_eos(token_ids)
    if not wanted & MAY_STOP and not np.count_nonzero(at_eos):
        return ()  # in almost every decode step
    may_stop = (batch.output_index >= batch.columns["min_tokens"]) & (token_ids >= 0)
    at_eos &= may_stop & ~batch.columns["ignore_eos"]
    kinds = dict.fromkeys(np.flatnonzero(at_eos).tolist(), EOS)
    if wanted & STOP_IDS:
        hit = (columns.stop_ids[batch.rows] == token_ids[:, None]).any(axis=1) & may_stop
        for index in np.flatnonzero(hit).tolist():
            kinds.setdefault(index, TOKEN)
    if wanted & STOP_STRINGS and watcher is not None:
        watched = np.flatnonzero(((options & STOP_STRINGS) != 0) & (token_ids >= 0))
        watched = watched[[index not in kinds for index in watched.tolist()]]
        for found in watcher.feed(batch.rows[watched], token_ids[watched]) if len(watched) else ():
            if batch.output_index[watched[found]] >= batch.columns["min_stop_tokens"][watched[found]]:
                kinds[int(watched[found])] = STRING
    if wanted & DETECTS_REPETITION:
        watched = np.flatnonzero(((options & DETECTS_REPETITION) != 0) & (token_ids >= 0))
        repeats = columns.repetitions.feed(batch.rows[watched], token_ids[watched])
        repeats &= batch.output_index[watched] + 1 >= batch.columns["min_tokens"][watched]
        for index in watched[repeats].tolist():
            kinds.setdefault(index, REPETITION)
    return tuple(sorted(kinds.items()))

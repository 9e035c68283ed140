"""Where a sampled token ends its row's text."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mmengine.core.executor import CUT
from mmengine.request import Request
from mmengine.runtime.rows import STOP_IDS, STOP_STRINGS, RowColumns
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.structured_output.rows.rows import Cut

EOS, TOKEN, STRING = "eos", "token", "string"
CLOSED = "closed"  # its text was completed because its budget ends
GRAMMAR_END = "grammar"  # its grammar allows nothing more
STRING_ENDS = {True: STRING, False: CUT}  # by whether the form is complete before the stop string


class StopWatcher(Protocol):
    """Finds stop strings in the text of rows. It is asked about rows whose request has some, only."""

    def admit(self, row: int, request: Request, token_ids: np.ndarray) -> None:
        """`row` now belongs to `request`, which has stop strings; forget who held it before.

        `token_ids` int32: prompt and outputs known so far (a preempted request comes back with them);
        the prompt's length is that of request.prompt_token_ids.
        """

    def feed(self, rows: np.ndarray, token_ids: np.ndarray) -> Sequence[int]:
        """One new token of each row, both int32 [s]: the indices, ascending, into them where a stop
        string is now complete. Of a row that it named it finds none any more."""

    def cut(self, row: int) -> Cut | None:
        """Where a stop string ended the text of a row that has a form; None where none did."""


def may_stop(token_ids: np.ndarray, batch: SampleRows, columns: RowColumns) -> bool:
    """Whether `find_stops` could find any; in almost no step of rows that decode."""
    return bool(batch.wanted & (STOP_IDS | STOP_STRINGS) or np.count_nonzero(columns.is_eos(token_ids)))


def find_stops(
    token_ids: np.ndarray,
    batch: SampleRows,
    columns: RowColumns,
    watcher: StopWatcher | None,
) -> tuple[tuple[int, str], ...]:
    """(index, kind) for every sampling row that its token (int32 [s], negative: none) ends.

    A row stops at nothing before min_tokens tokens have been given, at a stop string before
    min_stop_tokens. End of sequence comes before a stop token, a stop token before a stop string.
    """
    options, wanted = batch.columns["options"], batch.wanted
    at_eos = columns.is_eos(token_ids)
    if not wanted & (STOP_IDS | STOP_STRINGS) and not np.count_nonzero(at_eos):
        return ()  # almost every step of rows that decode
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
    return tuple(sorted(kinds.items()))

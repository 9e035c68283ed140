"""Keeps the tokens of all running rows for drafters. A row is a running request's slot in the batch."""

import numpy as np

from mmengine.ragged import counting

TOGETHER = 64  # maximum number of steps that `settle` writes together


class Texts:
    """The token ids of all rows. Drafters can only read them.

    `tokens` (int32 [max_rows, width]) has each row's prompt and answer. `lengths` (int64 [max_rows]) counts
    the tokens in prompt and answer, and `num_prompt` (int64 [max_rows]) counts the tokens in the prompt. Call
    `settle` before every read: it writes the tokens from `append_later`. Memory pages are allocated only when
    a row uses them.
    """

    def __init__(self, max_rows: int, width: int):
        self._tokens = np.zeros((max_rows, width), np.int32)
        self._lengths = np.zeros(max_rows, np.int64)
        self._num_prompt = np.zeros(max_rows, np.int64)
        self._later: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
        self.tokens, self.lengths = _to_be_read(self._tokens), _to_be_read(self._lengths)
        self.num_prompt = _to_be_read(self._num_prompt)

    def admit(self, row: int, token_ids: np.ndarray, num_prompt: int) -> None:
        """Replace the tokens of `row`. The first `num_prompt` tokens are the prompt."""
        self._tokens[row, : len(token_ids)] = token_ids
        self._lengths[row], self._num_prompt[row] = len(token_ids), num_prompt

    def append(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Append tokens to `rows` [s].

        `counts` [s] is the number of tokens for each row. `token_ids` has the rows' tokens one after another.
        """
        if len(rows) == 1:  # a fast path without index arithmetic
            row = int(rows[0])
            at = int(self._lengths[row])
            self._lengths[row] = at + len(token_ids)
            self._tokens[row, at : at + len(token_ids)] = token_ids
            return
        places = counting(counts) + np.repeat(self.lengths[rows], counts)
        self._tokens[np.repeat(rows, counts), places] = token_ids
        self._lengths[rows] += counts

    def append_later(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None) -> None:
        """Append tokens as `append` does, but delay the write until `settle`.

        `counts` None means a single token for each row. The arrays must not be changed afterwards.
        """
        self._later.append((rows, token_ids, counts))
        if len(self._later) >= TOGETHER:
            self.settle()

    def settle(self) -> None:
        if not self._later:
            return
        steps, self._later = self._later, []
        rows = np.concatenate(
            [rows if counts is None else np.repeat(rows, counts) for rows, _, counts in steps]
        )
        order = np.argsort(rows, kind="stable")
        rows, said = rows[order], np.bincount(rows, minlength=len(self._lengths))
        places = self.lengths[rows] + counting(said[said > 0])
        self._tokens[rows, places] = np.concatenate([token_ids for _, token_ids, _ in steps])[order]
        self._lengths += said


def _to_be_read(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view

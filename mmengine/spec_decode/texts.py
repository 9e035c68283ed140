"""The tokens of running rows, as drafters read them."""

import numpy as np

from mmengine.ragged import counting


class Texts:
    """`tokens` int32 [max_rows, width]: of each row its prompt and all it said, `lengths` (int64 [max_rows])
    of them; `num_prompt` int64 [max_rows]. A drafter cannot write to them. Pages that no row reached take no
    memory."""

    def __init__(self, max_rows: int, width: int):
        self._tokens = np.zeros((max_rows, width), np.int32)
        self._lengths = np.zeros(max_rows, np.int64)
        self._num_prompt = np.zeros(max_rows, np.int64)
        self.tokens, self.lengths = _to_be_read(self._tokens), _to_be_read(self._lengths)
        self.num_prompt = _to_be_read(self._num_prompt)

    def admit(self, row: int, token_ids: np.ndarray, num_prompt: int) -> None:
        """`row` holds these tokens now."""
        self._tokens[row, : len(token_ids)] = token_ids
        self._lengths[row], self._num_prompt[row] = len(token_ids), num_prompt

    def say(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Rows [s] said `token_ids`, `counts` [s] of them each, one row after the other."""
        if len(rows) == 1:  # a row alone needs none of the index arithmetic
            row = int(rows[0])
            at = int(self._lengths[row])
            self._lengths[row] = at + len(token_ids)
            self._tokens[row, at : at + len(token_ids)] = token_ids
            return
        places = counting(counts) + np.repeat(self.lengths[rows], counts)
        self._tokens[np.repeat(rows, counts), places] = token_ids
        self._lengths[rows] += counts


def _to_be_read(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view

"""Finds answers that repeat a pattern of tokens endlessly, by the rules of vLLM's `repetition_detection`."""

import numpy as np

from mmengine.request import Request

_NOTHING = -1  # in `_recent`: a position before the first token of the answer


class RepetitionWatcher:
    """Tracks the last tokens of rows with `repetition_detection`, and counts matching tokens for each period.

    An answer repeats a pattern if its last p * min_count tokens have the period p, for some p from
    min_pattern_size to max_pattern_size. Each of the last p * (min_count - 1) tokens then equals the token p
    positions earlier. One counter per period is therefore sufficient. The arrays have P columns, the largest
    max_pattern_size so far, and take 12 * rows * P bytes.
    """

    def __init__(self, max_rows: int) -> None:
        self._recent = np.full((max_rows, 0), _NOTHING, np.int32)  # [rows, P], a ring of the last P tokens
        # [rows, P], column p - 1: how many consecutive tokens at the end equal the token p positions earlier.
        self._matches = np.zeros((max_rows, 0), np.int32)
        # [rows, P], number of matches at which an answer ends; 0: the period is not checked
        self._needed = np.zeros((max_rows, 0), np.int32)
        self._count = np.zeros(max_rows, np.int64)  # number of tokens in the answer
        # whether the answer had repeated itself before this admission, for example before a preemption
        self.has_repeated = np.zeros(max_rows, bool)

    def admit(self, row: int, request: Request, token_ids: np.ndarray) -> None:
        """Assign `row` to `request`. `token_ids`: int32, the prompt and the tokens of the answer so far."""
        detection = request.sampling.repetition_detection
        assert detection is not None
        self._grow(detection.max_pattern_size)
        answer, size = token_ids[len(request.prompt_token_ids) :], self._recent.shape[1]
        self._recent[row], self._matches[row], self._count[row] = _NOTHING, 0, len(answer)
        kept = np.arange(max(len(answer) - size, 0), len(answer))
        self._recent[row, kept % size] = answer[kept]
        self._needed[row] = needed = detection.needed_matches(size)
        self.has_repeated[row] = False
        for period in (np.flatnonzero(needed) + 1).tolist():
            if len(answer) <= period:
                break
            equal, places = answer[period:] == answer[:-period], np.arange(period, len(answer))
            runs = places - np.maximum.accumulate(np.where(equal, period - 1, places))
            self._matches[row, period - 1] = runs[-1]
            # If the answer repeated itself before this admission, the row only completes its grammar.
            is_found = (runs >= needed[period - 1]) & (places + 1 >= request.sampling.min_tokens)
            self.has_repeated[row] |= is_found.any()

    def feed(self, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Append one token to each of `rows` [s]. Returns which rows now repeat a pattern, bool [s]."""
        size = self._recent.shape[1]
        places = self._count[rows]
        before = (places[:, None] - 1 - np.arange(size)) % size
        equal = self._recent[rows[:, None], before] == token_ids[:, None]
        matches = np.where(equal, self._matches[rows] + 1, 0)
        self._matches[rows] = matches
        self._recent[rows, places % size] = token_ids
        self._count[rows] = places + 1
        needed = self._needed[rows]
        return ((matches >= needed) & (needed > 0)).any(axis=1)

    def _grow(self, size: int) -> None:
        """Grow the arrays to `size` columns, and copy each ring's tokens."""
        old = self._recent.shape[1]
        if size <= old:
            return
        rows = len(self._recent)
        recent = np.full((rows, size), _NOTHING, np.int32)
        if old:
            ages = np.arange(old)
            places = (self._count[:, None] - 1 - ages) % old
            tokens = np.take_along_axis(self._recent, places, 1)
            np.put_along_axis(recent, (self._count[:, None] - 1 - ages) % size, tokens, 1)
        self._recent = recent
        wider = ((0, 0), (0, size - old))
        self._matches, self._needed = np.pad(self._matches, wider), np.pad(self._needed, wider)

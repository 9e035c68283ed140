"""Prompt ids, written piece by piece."""

from collections.abc import Callable

import numpy as np

from mmengine.errors import InvalidRequest
from mmengine_qwen3_vl.tokens import QwenTokenizer


class TokenWriter:
    """Text between two special tokens is tokenized as one run, as if the prompt were one string.

    `limit`: how many ids there may be; `check_length` is called with a number of them that is known to be
    reached, before more work is done, and raises where it is above the limit.
    """

    def __init__(self, tokenizer: QwenTokenizer, limit: int, check_length: Callable[[int], None]) -> None:
        self._tokenizer, self._limit, self._check_length = tokenizer, limit, check_length
        self._text: list[str] = []
        self._parts: list[np.ndarray] = []
        self.count = 0  # ids so far, without the text not yet tokenized

    def add(self, piece: str | int) -> None:
        if isinstance(piece, str):
            self._text.append(piece)
        else:
            self.repeat(piece, 1)

    def repeat(self, token_id: int, times: int) -> tuple[int, int]:
        """Gives the run (start, length)."""
        self._flush()
        start = self.count
        self._append(np.full(times, token_id, np.int32))
        return start, times

    def finish(self) -> np.ndarray:
        self._flush()
        if not self.count:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        return np.concatenate(self._parts)

    def _flush(self) -> None:
        if self._text:
            text = "".join(self._text)
            if self._tokenizer.exceeds(text, self._limit - self.count):
                self._check_length(self._limit + 1)
            self._text.clear()
            self._append(np.asarray(self._tokenizer.encode(text), np.int32))

    def _append(self, ids: np.ndarray) -> None:
        self._parts.append(ids)
        self.count += len(ids)
        self._check_length(self.count)

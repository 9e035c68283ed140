"""Prompt ids, written piece by piece."""

import numpy as np

from mmengine.errors import InvalidRequest
from mmengine_qwen3_vl.tokens import QwenTokenizer


class TokenWriter:
    """Text between two special tokens is tokenized as one run, as if the prompt were one string."""

    def __init__(self, tokenizer: QwenTokenizer) -> None:
        self._tokenizer = tokenizer
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
            ids = self._tokenizer.encode("".join(self._text))
            self._text.clear()
            self._append(np.asarray(ids, np.int32))

    def _append(self, ids: np.ndarray) -> None:
        self._parts.append(ids)
        self.count += len(ids)

"""Builds the token ids of a prompt from text pieces, special tokens and placeholders."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.processing.chat.tokens import ChatTokenizer


class Run(NamedTuple):
    """A placeholder token, repeated `length` times. Later, the encoder's embeddings replace the repeated
    tokens.
    """

    token: int
    length: int


Piece = str | int | Run  # Text, the id of a special token, or placeholders.


class TokenWriter:
    """Collects the token ids of a prompt. Text between two special tokens is tokenized as a whole.

    `limit`: maximum number of ids. `check_length`: a function that raises the error for a prompt that is too
    long. Its argument is a lower bound on the prompt's length.
    """

    def __init__(self, tokenizer: ChatTokenizer, limit: int, check_length: Callable[[int], None]) -> None:
        self._tokenizer, self._limit, self._check_length = tokenizer, limit, check_length
        self._text: list[str] = []  # Text that is not tokenized yet.
        self._ids: list[int] = []

    def add(self, piece: str | int) -> None:
        if isinstance(piece, str):
            self._text.append(piece)
        else:
            self.repeat(piece, 1)

    def repeat(self, token_id: int, times: int) -> tuple[int, int]:
        """Append `token_id` `times` times, and return its position (start, length)."""
        if self._text:
            self._flush()
        start = len(self._ids)
        self._check(start + times)
        self._ids += [token_id] * times
        return start, times

    def write(self, pieces: Iterable[Piece]) -> tuple[tuple[int, int], ...]:
        """Append the pieces. Return the position of each Run: (start, length)."""
        runs = []
        for piece in pieces:
            if isinstance(piece, Run):
                runs.append(self.repeat(piece.token, piece.length))
            else:
                self.add(piece)
        return tuple(runs)

    def finish(self) -> np.ndarray:
        """Return all token ids as int32 [n]. Raises InvalidRequest for an empty prompt."""
        if self._text:
            self._flush()
        if not self._ids:
            raise InvalidRequest("the prompt is empty; at least one token is needed", path=("prompt",))
        return np.array(self._ids, np.int32)

    def _flush(self) -> None:
        text = "".join(self._text)
        if self._tokenizer.exceeds(text, self._limit - len(self._ids)):
            self._check(self._limit + 1)
        self._text.clear()
        self._ids += self._tokenizer.encode(text)
        self._check(len(self._ids))

    def _check(self, count: int) -> None:
        if count > self._limit:
            self._check_length(count)

"""Finds stop strings in running rows' text.

A row is a running request's index in the batch.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mmengine.models.plugin import Tokenizer
from mmengine.request import Request
from mmengine.serve.text.choice_deltas import ChoiceDeltas
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.reasoning import reasoning_of
from mmengine.structured_output.rows.rows import Cut


class _Text(Protocol):
    """Decodes a row's tokens. `cut_off` is the stop string and the later text, which are not shown."""

    @property
    def stopped(self) -> bool: ...

    @property
    def cut_off(self) -> str: ...

    def push(self, token_ids: Sequence[int]) -> object: ...


class StopStrings:
    """Decodes each row's output up to the first stop string, if the row's request has stop strings."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._watched = np.zeros(0, dtype=bool)
        self._texts: dict[int, _Text] = {}
        self._tokens: dict[int, list[int]] = {}  # row with a grammar -> tokens up to a stop string

    def admit(self, row: int, request: Request, token_ids: Sequence[int]) -> None:
        """Assign `row` to `request`. `token_ids` has the request's prompt and its output so far."""
        if row >= len(self._watched):
            self._watched = np.concatenate(
                [self._watched, np.zeros(row + 1 - len(self._watched), dtype=bool)]
            )
        self._texts.pop(row, None)
        self._tokens.pop(row, None)
        self._watched[row] = bool(request.sampling.stop)
        if not request.sampling.stop:
            return
        self._texts[row] = self._text(request)
        if request.grammar is not None:
            self._tokens[row] = []
        for token in token_ids[len(request.prompt_token_ids) :]:
            if self._push(row, int(token)):
                break

    def _text(self, request: Request) -> _Text:
        if request.grammar is None or request.grammar.kind != "tool_calls":
            return Stops.of(request.sampling, request.grammar).stream(self._tokenizer)
        reasoning = reasoning_of(request.grammar, self._tokenizer)
        return ChoiceDeltas(self._tokenizer, request.sampling, reasoning, request.grammar)

    def _push(self, row: int, token: int) -> bool:
        """Add a token and return whether it completes a stop string."""
        text = self._texts[row]
        text.push((token,))
        if row in self._tokens:
            self._tokens[row].append(token)
        if text.stopped:
            self._watched[row] = False
        return text.stopped

    def feed(self, rows: np.ndarray, token_ids: np.ndarray) -> list[int]:
        """Add a token to each row in `rows`. Both arrays are int32 [s].

        Returns the ascending indices into `rows` at which a stop string is now complete.
        """
        watched = np.flatnonzero(self._watched[rows]).tolist()
        return [index for index in watched if self._push(int(rows[index]), int(token_ids[index]))]

    def cut(self, row: int) -> Cut | None:
        """Return the row's tokens up to a stop string, and the text that the stop string cut off. Returns
        None for a row without a grammar, or before a stop string.
        """
        text = self._texts.get(row)
        if text is None or row not in self._tokens or not text.stopped:
            return None
        return Cut(tuple(self._tokens[row]), text.cut_off)

"""Stop strings in the text of the running rows, on behalf of the model runner."""

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
    """Of a row, as far as its tokens were pushed. `behind`: what the stop string cut off, from it on."""

    @property
    def stopped(self) -> bool: ...

    @property
    def behind(self) -> str: ...

    def push(self, token_ids: Sequence[int]) -> object: ...


class StopStrings:
    """Only rows whose request has stop strings cost anything. A text that a stop string ended is not looked
    at any more."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._watched = np.zeros(0, dtype=bool)
        self._texts: dict[int, _Text] = {}
        self._said: dict[int, list[int]] = {}  # tokens of rows that have a form, up to a stop string

    def admit(self, row: int, request: Request, token_ids: Sequence[int]) -> None:
        """`request` got `row`; `token_ids` are its prompt and the output it has so far."""
        if row >= len(self._watched):
            self._watched = np.concatenate(
                [self._watched, np.zeros(row + 1 - len(self._watched), dtype=bool)]
            )
        self._texts.pop(row, None)
        self._said.pop(row, None)
        self._watched[row] = bool(request.sampling.stop)
        if not request.sampling.stop:
            return
        self._texts[row] = self._text(request)
        if request.grammar is not None:
            self._said[row] = []
        for token in token_ids[len(request.prompt_token_ids) :]:
            if self._push(row, int(token)):
                break

    def _text(self, request: Request) -> _Text:
        if request.grammar is None or request.grammar.kind != "tool_calls":
            return Stops.of(request.sampling, request.grammar).stream(self._tokenizer)
        reasoning = reasoning_of(request.grammar, self._tokenizer)
        return ChoiceDeltas(self._tokenizer, request.sampling, reasoning, request.grammar)

    def _push(self, row: int, token: int) -> bool:
        """Whether a stop string is complete with it."""
        text = self._texts[row]
        text.push((token,))
        if row in self._said:
            self._said[row].append(token)
        if text.stopped:
            self._watched[row] = False
        return text.stopped

    def feed(self, rows: np.ndarray, token_ids: np.ndarray) -> list[int]:
        """One new token (int32 [s]) for each of `rows` (int32 [s]): the indices, ascending, at
        which a stop string is now complete."""
        watched = np.flatnonzero(self._watched[rows]).tolist()
        return [index for index in watched if self._push(int(rows[index]), int(token_ids[index]))]

    def cut(self, row: int) -> Cut | None:
        """Where a stop string ended the text of a row that has a form; None where none did."""
        text = self._texts.get(row)
        if text is None or row not in self._said or not text.stopped:
            return None
        return Cut(tuple(self._said[row]), text.behind)

"""Records the token order of a prompt's choices (the parameter `n`): which choice got each sampled token.

After a crash, a stream with several choices must repeat its tokens in the same order.
"""

from collections.abc import Iterable

import numpy as np

from mmengine.core.snapshot.body import SavedOrder
from mmengine.core.state.request_state import NO_ROW
from mmengine.request import MAX_CHOICES

_NO_CHOICE = -1
_MAX_PARTS = 1024  # maximum number of arrays in the trace


class ChoiceOrders:
    """The token orders of all prompts with several choices.

    Each choice has a number: the prompt's number times MAX_CHOICES, plus the choice's index.
    """

    def __init__(self, num_rows: int) -> None:
        self._of_row = np.full(num_rows, _NO_CHOICE, np.int64)  # the number of the choice in each row
        self._numbers: dict[str, int] = {}  # request id -> number
        self._choices: dict[str, list[str]] = {}  # the first choice's id -> the ids of all choices
        self._num_prompts = 0
        self._trace: list[np.ndarray] = []  # for each sampled token, the number of the token's choice

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def begin(self, request_id: str, first: str, row: int) -> None:
        """Add a choice with the id `request_id` to a prompt whose first choice has the id `first`.

        `row`: the first choice's row in the batch, or NO_ROW.
        """
        if first not in self._choices:
            self._choices[first] = [first]
            self._numbers[first] = self._num_prompts * MAX_CHOICES
            self._num_prompts += 1
            if row != NO_ROW:
                self.admit(first, row)
        choices = self._choices[first]
        if len(choices) < MAX_CHOICES:
            self._numbers[request_id] = self._numbers[first] + len(choices)
            choices.append(request_id)

    def admit(self, request_id: str, row: int) -> None:
        self._of_row[row] = self._numbers.get(request_id, _NO_CHOICE)

    def sample(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Record a step's tokens. `num_tokens`: the token count for each row in `rows` (intp)."""
        numbers = np.repeat(self._of_row[rows], num_tokens)
        numbers = numbers[numbers != _NO_CHOICE]
        if len(numbers):
            self._trace.append(numbers)
            if len(self._trace) > _MAX_PARTS:
                self._trace = [np.concatenate(self._trace)]

    def forget(self, request_id: str, group: str) -> None:
        """Forget a choice. A prompt's order is forgotten together with its last choice."""
        first = group or request_id
        choices = self._choices.get(first)
        if choices is None or request_id not in self._numbers:
            return
        number = self._numbers.pop(request_id)
        if any(name in self._numbers for name in choices):
            return
        del self._choices[first]
        trace = np.concatenate(self._trace) if self._numbers and self._trace else np.zeros(0, np.int64)
        self._trace = [trace[trace // MAX_CHOICES != number // MAX_CHOICES]]

    def orders(self) -> dict[str, bytes]:
        """Return a dict from the first choice's id to the prompt's order.

        An order has one byte for each sampled token: the index of the token's choice.
        """
        if not self._choices:
            return {}
        trace = np.concatenate(self._trace) if self._trace else np.zeros(0, np.int64)
        prompts = trace // MAX_CHOICES
        trace = trace[np.argsort(prompts, kind="stable")]
        prompts = trace // MAX_CHOICES
        found = {}
        for first, choices in self._choices.items():
            number = next(self._numbers[name] for name in choices if name in self._numbers) // MAX_CHOICES
            start, end = np.searchsorted(prompts, (number, number + 1))
            found[first] = (trace[start:end] % MAX_CHOICES).astype(np.uint8).tobytes()
        return found

    def saved(self) -> tuple[SavedOrder, ...]:
        orders = self.orders()
        return tuple(
            (first, tuple(name if name in self._numbers else "" for name in choices), orders[first])
            for first, choices in self._choices.items()
        )

    def restore(self, saved: Iterable[SavedOrder], running: Iterable[tuple[str, int]]) -> None:
        """Restore orders that `saved` returned. `running`: (request id, row) for each running request."""
        for first, choices, order in saved:
            base = self._num_prompts * MAX_CHOICES
            self._num_prompts += 1
            self._choices[first] = list(choices)
            self._numbers.update({name: base + index for index, name in enumerate(choices) if name})
            self._trace.append(np.frombuffer(order, np.uint8).astype(np.int64) + base)
        for request_id, row in running:
            self.admit(request_id, row)

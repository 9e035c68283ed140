"""Assigns rows to requests: the lowest number that no running request and no step in flight uses."""

import heapq
from collections.abc import Iterable

import numpy as np

from mmengine_vllm.columns import intp_array
from mmengine_vllm.entries import NO_ROW, Step


class Rows:
    """The rows 0 to `num_rows` - 1, and the requests that have them."""

    def __init__(self, num_rows: int):
        self._of: dict[str, int] = {}
        self._free = list(range(num_rows))  # a heap
        self._leaving: list[tuple[int, int]] = []  # (last step in flight that contains the row, row)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __len__(self) -> int:
        return len(self._of)

    def row_of(self, name: str) -> int:
        """Return a request's row, or NO_ROW."""
        return self._of.get(name, NO_ROW)

    def rows_of(self, names: list[str]) -> np.ndarray:
        """Return the rows of running requests, intp. Raises KeyError for a request that is not running."""
        rows = self._of
        return intp_array([rows[name] for name in names])

    def give(self, name: str) -> int:
        """Assign a row to a request. Raises IndexError if no row is free."""
        row = self._of[name] = heapq.heappop(self._free)
        return row

    def take(self, name: str, in_flight: Iterable[Step]) -> None:
        """Take the row from a request, if it has one. The row becomes free when none of the steps `in_flight`
        (newest first) contains it any more.
        """
        row = self._of.pop(name, NO_ROW)
        if row == NO_ROW:
            return
        for step in in_flight:
            if name in step.output.num_scheduled_tokens:
                self._leaving.append((step.number, row))
                return
        heapq.heappush(self._free, row)

    def land(self, number: int) -> None:
        """Free the rows that waited for the end of step `number`."""
        if self._leaving:
            for last, row in self._leaving:
                if last <= number:
                    heapq.heappush(self._free, row)
            self._leaving = [each for each in self._leaving if each[0] > number]

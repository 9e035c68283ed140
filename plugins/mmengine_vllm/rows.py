"""Assigns each request the lowest row that no running request and no step in flight uses."""

import heapq
from collections.abc import Iterable

from mmengine_vllm.columns import int32_bytes
from mmengine_vllm.entries import NO_ROW, Step


class Rows:
    """The rows 0 to `num_rows` - 1, and the requests that have them."""

    def __init__(self, num_rows: int):
        self._of: dict[str, int] = {}
        self._free = list(range(num_rows))  # a heap
        self.gone: list[int] = []  # rows taken from requests since the last step was decided
        self._leaving: list[tuple[int, int]] = []  # (last step in flight that contains the row, row)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __len__(self) -> int:
        return len(self._of)

    def row_of(self, name: str) -> int:
        """Return a request's row, or NO_ROW."""
        return self._of.get(name, NO_ROW)

    def rows_of(self, names: list[str]) -> bytes:
        """Return running requests' rows as int32 bytes, in the order of `names`. Raises KeyError for a
        request that is not running.
        """
        return int32_bytes(list(map(self._of.__getitem__, names)))

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
        self.gone.append(row)
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


def find_row(column: bytes, row: int) -> int:
    """Return a row's index in a column (rows as int32 bytes), or -1."""
    number = int32_bytes((row,))
    at = column.find(number)
    while at % 4 and at > 0:
        at = column.find(number, at + 1)
    return at // 4


class StepRows:
    """Builds each step's column: the running rows as int32 bytes. Usually the previous step's column is
    reused.
    """

    def __init__(self, rows: Rows):
        self._rows = rows
        self._ids, self._column = list[str](), b""  # of the previous step

    def column(self, running: list[str]) -> tuple[bytes, bool]:
        """Return the column of `running`, and whether these requests equal the previous step's requests."""
        if running == self._ids:
            return self._column, True
        ids, column = self._ids, self._column
        if len(running) < len(ids) <= len(running) + len(self._rows.gone):
            ids = ids.copy()
            for row in self._rows.gone:
                if (place := find_row(column, row)) >= 0:
                    del ids[place]
                    column = column[: place * 4] + column[place * 4 + 4 :]
            if running == ids:
                return column, False
        return self._rows.rows_of(running), False

    def decided(self, ids: list[str], column: bytes) -> None:
        """Remember the decided step's requests and rows for the next step."""
        self._ids, self._column = ids, column
        self._rows.gone.clear()

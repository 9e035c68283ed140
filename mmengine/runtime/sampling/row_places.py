"""Places of rows in tables that only some rows need."""

from collections.abc import Callable

import numpy as np

from mmengine.ragged import NO_PLACE


class RowPlaces:
    """`of`: int64 [max_rows], the place of each row, or NO_PLACE. `grow` makes room in the tables for so many
    places; what it raises leaves the places as they are."""

    def __init__(self, max_rows: int, grow: Callable[[int], None]) -> None:
        self.of = np.full(max_rows, NO_PLACE, np.int64)
        self._grow = grow
        self._free: list[int] = []
        self._count = 0

    def take(self, row: int) -> int:
        """The row's place: its own, or one that is free."""
        if self.of[row] == NO_PLACE:
            if not self._free:
                count = max(4, 2 * self._count)
                self._grow(count)
                self._free.extend(range(count - 1, self._count - 1, -1))
                self._count = count
            self.of[row] = self._free.pop()
        return int(self.of[row])

    def leave(self, row: int) -> None:
        """Give the place of a row back, if it has one."""
        if self.of[row] != NO_PLACE:
            self._free.append(int(self.of[row]))
            self.of[row] = NO_PLACE

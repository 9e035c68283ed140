"""Assigns indices (places) in tables that have entries only for some rows, to save memory."""

from collections.abc import Callable

import numpy as np

from mmengine.ragged import NO_PLACE


class RowPlaces:
    """Assigns a place in the tables to each row that needs one.

    `of`: int64 [max_rows], each row's place, or NO_PLACE. `grow`: a function that enlarges the tables to a
    given size. If it raises, the places stay unchanged.
    """

    def __init__(self, max_rows: int, grow: Callable[[int], None]) -> None:
        self.of = np.full(max_rows, NO_PLACE, np.int64)
        self._grow = grow
        self._free: list[int] = []
        self._count = 0

    def take(self, row: int) -> int:
        """Return the row's place. A row without a place gets a free one."""
        if self.of[row] == NO_PLACE:
            if not self._free:
                count = max(4, 2 * self._count)
                self._grow(count)
                self._free.extend(range(count - 1, self._count - 1, -1))
                self._count = count
            self.of[row] = self._free.pop()
        return int(self.of[row])

    def leave(self, row: int) -> None:
        """Release the row's place, if it has one."""
        if self.of[row] != NO_PLACE:
            self._free.append(int(self.of[row]))
            self.of[row] = NO_PLACE

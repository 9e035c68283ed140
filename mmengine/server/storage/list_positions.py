"""Gives each list entry a position in creation order. A recently deleted entry keeps its position, so that a
client can continue to page through a list after that entry.
"""

from collections import deque

MAX_GONE = 20_000  # Maximum number of deleted entries that keep their positions, for all owners together.


class ListPositions:
    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}  # Maps an id to the owner and the position.
        self._gone: deque[str] = deque()
        self._last = 0

    def add(self, name: str, owner: str) -> None:
        """Add an entry at the end if the entry has no position yet."""
        if name not in self._places:
            self._last += 1
            self._places[name] = owner, self._last

    def remove(self, name: str) -> None:
        """Mark an entry as deleted. The entry keeps its position until MAX_GONE more entries have been
        deleted.
        """
        self._gone.append(name)
        if len(self._gone) > MAX_GONE:
            self._places.pop(self._gone.popleft(), None)

    def of(self, name: str, owner: str) -> int | None:
        """Return an entry's position; a later entry has a larger position. Returns None if the entry is
        unknown or has another owner. Thread-safe.
        """
        found = self._places.get(name)
        return found[1] if found is not None and found[0] == owner else None

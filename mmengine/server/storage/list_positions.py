"""Numbers the entries of paged lists in creation order. A deleted entry keeps its position for some time, so
a client can still request the next page after the entry.
"""

from collections import deque

MAX_GONE = 20_000  # Maximum number of deleted entries with positions, over all owners.


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
        """Mark an entry as deleted. The entry keeps its position for the next MAX_GONE deletions."""
        self._gone.append(name)
        if len(self._gone) > MAX_GONE:
            self._places.pop(self._gone.popleft(), None)

    def of(self, name: str, owner: str) -> int | None:
        """Return an entry's position, or None if the entry is unknown or has another owner. A later entry has
        a larger position. Thread-safe.
        """
        found = self._places.get(name)
        return found[1] if found is not None and found[0] == owner else None

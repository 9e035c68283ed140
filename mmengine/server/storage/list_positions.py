"""Keeps entries' positions in creation order. Recently deleted entries keep their positions, so that a client
can continue a list after a deleted entry.
"""

from collections import deque

MAX_GONE = 20_000  # Maximum number of deleted entries whose positions are kept, for all owners together.


class ListPositions:
    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}  # For each id, the owner and the position.
        self._gone: deque[str] = deque()
        self._last = 0

    def add(self, name: str, owner: str) -> None:
        """Append an entry, unless it already has a position."""
        if name not in self._places:
            self._last += 1
            self._places[name] = owner, self._last

    def remove(self, name: str) -> None:
        """Mark an entry as deleted. Its position is kept until MAX_GONE later deletions."""
        self._gone.append(name)
        if len(self._gone) > MAX_GONE:
            self._places.pop(self._gone.popleft(), None)

    def of(self, name: str, owner: str) -> int | None:
        """Return the position, which grows in creation order. None if the entry is unknown or has another
        owner. Thread-safe.
        """
        found = self._places.get(name)
        return found[1] if found is not None and found[0] == owner else None

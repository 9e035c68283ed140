"""Positions in a list's order of creation. Deleted entries keep their position for a while, so a client can
continue with the next page.
"""

from collections import deque

MAX_GONE = 20_000  # deleted entries whose positions are remembered, of all owners together


class ListPositions:
    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}  # owner and number by id
        self._gone: deque[str] = deque()
        self._last = 0

    def add(self, name: str, owner: str) -> None:
        """Append an entry, unless it is known."""
        if name not in self._places:
            self._last += 1
            self._places[name] = owner, self._last

    def remove(self, name: str) -> None:
        """Mark an entry as deleted; its position stays known for a while."""
        self._gone.append(name)
        if len(self._gone) > MAX_GONE:
            self._places.pop(self._gone.popleft(), None)

    def of(self, name: str, owner: str) -> int | None:
        """Return a number that grows with creation order, or None if the entry is unknown or another owner's.
        Thread-safe.
        """
        found = self._places.get(name)
        return found[1] if found is not None and found[0] == owner else None

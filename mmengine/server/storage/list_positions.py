"""In which order things came, those that are gone included: who turns pages may stand at one of them."""

from collections import deque

MAX_GONE = 20_000  # things that are gone whose places are remembered, of all owners


class Places:
    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}  # owner and number by id
        self._gone: deque[str] = deque()
        self._last = 0

    def add(self, name: str, owner: str) -> None:
        """It came behind all others, unless it is there."""
        if name not in self._places:
            self._last += 1
            self._places[name] = owner, self._last

    def remove(self, name: str) -> None:
        """It is gone, and its place stays for a while."""
        self._gone.append(name)
        if len(self._gone) > MAX_GONE:
            self._places.pop(self._gone.popleft(), None)

    def of(self, name: str, owner: str) -> int | None:
        """Larger for what came later; None for what never was, or is another owner's. On any thread."""
        found = self._places.get(name)
        return found[1] if found is not None and found[0] == owner else None

"""A fair share for each API key: one key's calls leave room for those of others."""

from collections import Counter

from mmengine.server.errors import ApiError


class Shares:
    """`limit`: calls that may be open together; of these a key may have `share`, where there are others."""

    def __init__(self, limit: int, share: float):
        self._most = max(1, int(limit * share))
        self._open: Counter[str] = Counter()

    def take(self, owner: str, *, is_alone: bool) -> None:
        """A call of this key begins; `give` ends it. Raises ApiError."""
        if not is_alone and self._open[owner] >= self._most:
            raise ApiError(
                429,
                f"this API key has {self._most} calls open already, its share (key_share); try again later",
                code="key_share_full",
                headers={"retry-after": "1"},
            )
        self._open[owner] += 1

    def give(self, owner: str) -> None:
        self._open[owner] -= 1
        if not self._open[owner]:
            del self._open[owner]

    @property
    def num_open(self) -> int:
        return self._open.total()

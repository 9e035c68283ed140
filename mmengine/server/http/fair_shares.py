"""A fair share for each API key: one key's calls, and their bodies, leave room for those of others."""

from collections import Counter
from functools import partial

from mmengine.errors import ErrorCode
from mmengine.server.http.body_reader import Bodies, Held
from mmengine.server.http.drain_rate import DrainRate
from mmengine.server.http.errors import ApiError


class Shares:
    """`limit`: calls that may be open together; of these, and of the room for bodies, a key may have `share`
    where there are others."""

    def __init__(self, limit: int, share: float, bodies: Bodies, rate: DrainRate):
        self._most = max(1, int(limit * share))
        self._most_bytes = int(bodies.max_bytes * share)
        self._bodies, self._rate = bodies, rate
        self._open: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # bytes

    def take(self, owner: str, *, is_alone: bool) -> None:
        """A call of this key begins; `give` ends it. Raises ApiError."""
        if not is_alone and self._open[owner] >= self._most:
            raise self._refused(
                owner,
                f"this API key has {self._most} calls open already, its share (key_share); try again later",
            )
        self._open[owner] += 1
        self._rate.begin()

    def give(self, owner: str) -> None:
        self._open[owner] -= 1
        if not self._open[owner]:
            del self._open[owner]
        self._rate.end()

    def holding(self, owner: str, *, is_alone: bool) -> Held:
        """Room for a body of this key, as `Bodies.holding`. The first one always has room."""
        return self._bodies.holding(partial(self._added, owner, is_alone))

    def _added(self, owner: str, is_alone: bool, held: int, count: int) -> None:
        """To a body that has `held` bytes of those of its key."""
        others = self._held[owner] - held
        if count > 0 and not is_alone and others and self._held[owner] + count > self._most_bytes:
            raise self._refused(
                owner,
                f"this API key has bodies of {self._held[owner]} bytes on their way, and its share is "
                f"{self._most_bytes} (key_share); try again later",
            )
        self._held[owner] += count
        if not self._held[owner]:
            del self._held[owner]

    def _refused(self, owner: str, text: str) -> ApiError:
        num_others = self._rate.num_open / max(1, self._open[owner])  # calls that end for each of its own
        return ApiError(
            ErrorCode.KEY_SHARE_FULL,
            text,
            headers={"retry-after": str(self._rate.retry_after_s(num_others)), "connection": "close"},
        )

    @property
    def num_open(self) -> int:
        return self._open.total()

    @property
    def num_bytes(self) -> int:
        """Of bodies, by the keys' count."""
        return self._held.total()

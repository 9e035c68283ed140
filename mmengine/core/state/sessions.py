"""Sessions: requests that grow one another, and the pool of KV blocks that they keep in between.

A session is a chain: its tokens, the media in them, and where each of its requests began. The next request
stands behind them; a prefix hit finds what is computed already. So that others do not push that out, a
session holds a *lease*: references to the full blocks of its chain. All leases together have a limit, and
are taken back, the longest unused and the end of it first, where a request would otherwise wait or give way.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from mmengine.request import MediaItem, num_before

NO_BLOCKS = np.zeros(0, np.int32)
NO_REQUEST = ""
IDLE = "idle"  # why a session is closed that nobody asks any more


class Chunk(NamedTuple):
    """What one request brought to a session. `start`: of its tokens; `num_outputs`: at their end, its answer.
    The rest as in APPENDED."""

    start: int
    num_outputs: int
    num_opening: int
    is_anchor: bool
    film: int = 0


class Place(NamedTuple):
    """Where the request that is on its way stands, as APPENDED says it; `num_kept` is within the session."""

    num_kept: int
    num_opening: int
    is_anchor: bool
    film: int = 0


@dataclass(slots=True, eq=False)
class SessionState:
    """`tokens`: int32. `live`: the request that is on its way, or NO_REQUEST. `leased`: int32 blocks of its
    beginning, in order. `used`: when the lease was given last, counted by `Sessions.clock`."""

    session_id: str
    cache_salt: str = ""
    idle_ns: int = 0
    envelope: bytes = b""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    media: tuple[MediaItem, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    live: str = NO_REQUEST
    place: Place = Place(0, 0, False)
    leased: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    used: int = 0
    num_grown: int = 0  # requests that became part of it
    is_settled: bool = False  # it has its lease for the request that is about to end

    def before(self, num_kept: int) -> tuple[MediaItem, ...]:
        """The media within its first tokens."""
        return self.media[: num_before(self.media, num_kept)]


class Sessions:
    """By id, in the order in which they were opened. Callers read; only `evolve` calls what changes."""

    def __init__(self) -> None:
        self.all: dict[str, SessionState] = {}
        self.of_request: dict[str, SessionState] = {}  # by the id of the one that is on its way
        self.clock = 0

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_leased(self) -> int:
        """Blocks; one that two sessions hold counts twice."""
        return sum(len(session.leased) for session in self.all.values())

    def leased(self) -> np.ndarray:
        """The blocks of all leases, int32, one that several hold as often."""
        return np.concatenate([NO_BLOCKS, *(session.leased for session in self.all.values())])

    def by_age(self) -> list[SessionState]:
        """Those that hold blocks: those that nobody asks now first, the longest unused of them first."""
        holders = [session for session in self.all.values() if len(session.leased)]
        return sorted(holders, key=lambda session: (session.live != NO_REQUEST, session.used))

    def add(self, session: SessionState) -> None:
        self.all[session.session_id] = session
        if session.live != NO_REQUEST:
            self.of_request[session.live] = session

    def remove(self, session_id: str) -> SessionState:
        session = self.all.pop(session_id)
        self.of_request.pop(session.live, None)
        return session

    def begin(self, session: SessionState, request_id: str, place: Place) -> None:
        """A request of the session is on its way."""
        session.live, session.place = request_id, place
        self.of_request[request_id] = session

    def end(self, request_id: str) -> SessionState | None:
        """It is over. None: it is of no session."""
        session = self.of_request.pop(request_id, None)
        if session is not None:
            session.live, session.is_settled = NO_REQUEST, False
        return session

    def digest_parts(self) -> bytes:
        """What decisions read of them."""
        said = [
            (
                *(each.session_id, each.cache_salt, each.live, each.used, each.place),
                *(each.num_grown, each.media, each.chunks, each.tokens.tobytes(), each.leased.tobytes()),
            )
            for each in self.all.values()
        ]
        return msgspec.msgpack.encode((self.clock, said))

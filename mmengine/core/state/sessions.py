"""Sessions: chains of requests, and the KV blocks that a session keeps between its requests.

A session has tokens, their media, and the places where its requests began. The next request continues after
them, and prefix hits find the computed blocks. To protect those blocks from eviction, a session holds a
*lease*: references to its chain's full blocks. All leases together have a limit. Leases are taken back
when a request would otherwise wait or be preempted, the longest unused session first, from its chain's end.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from mmengine.request import MediaItem, num_before

NO_BLOCKS = np.zeros(0, np.int32)
NO_REQUEST = ""
IDLE = "idle"  # the reason of closing a session that is not used


class Chunk(NamedTuple):
    """A session's part that one request added. `start`: its first token; `num_outputs`: the answer at
    its end. The other fields are as in APPENDED.
    """

    start: int
    num_outputs: int
    num_opening: int
    is_anchor: bool
    film: int = 0


class Place(NamedTuple):
    """The running request's place in its session, as in APPENDED; `num_kept` is at most the session's
    length.
    """

    num_kept: int
    num_opening: int
    is_anchor: bool
    film: int = 0


@dataclass(slots=True, eq=False)
class SessionState:
    """One open session. `tokens`: int32. `live`: the running request, or NO_REQUEST. `leased`: the leased
    blocks in order, int32. `used`: the last lease's time, counted by `Sessions.clock`.
    """

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
    num_grown: int = 0  # requests that became part of the session
    is_settled: bool = False  # the lease for the ending request is done

    def before(self, num_kept: int) -> tuple[MediaItem, ...]:
        """Return the media within the session's first `num_kept` tokens."""
        return self.media[: num_before(self.media, num_kept)]


class Sessions:
    """The open sessions by id, in opening order. Only `evolve` calls methods that change
    them."""

    def __init__(self) -> None:
        self.all: dict[str, SessionState] = {}
        self.of_request: dict[str, SessionState] = {}  # by the id of the running request
        self.clock = 0

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_leased(self) -> int:
        """The number of leased blocks; a block that two sessions hold counts twice."""
        return sum(len(session.leased) for session in self.all.values())

    def leased(self) -> np.ndarray:
        """Return all leased blocks, int32. A block of several leases occurs as often."""
        return np.concatenate([NO_BLOCKS, *(session.leased for session in self.all.values())])

    def by_age(self) -> list[SessionState]:
        """Return the sessions with leases: first those without a running request, the longest unused
        first."""
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
        """Note that a request of the session runs."""
        session.live, session.place = request_id, place
        self.of_request[request_id] = session

    def end(self, request_id: str) -> SessionState | None:
        """Note that the request ended, and return its session or None."""
        session = self.of_request.pop(request_id, None)
        if session is not None:
            session.live, session.is_settled = NO_REQUEST, False
        return session

    def digest_parts(self) -> bytes:
        """Return the values that decisions read, for the digest."""
        said = [
            (
                *(each.session_id, each.cache_salt, each.live, each.used, each.place),
                *(each.num_grown, each.media, each.chunks, each.tokens.tobytes(), each.leased.tobytes()),
            )
            for each in self.all.values()
        ]
        return msgspec.msgpack.encode((self.clock, said))

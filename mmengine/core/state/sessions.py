"""Sessions: chains of requests, for example a chat's turns, whose KV blocks are kept between requests.

A session contains its requests' tokens and media, and the positions at which the requests begin. The next
request's prompt continues after these tokens, and the prefix cache finds their blocks. To protect these
blocks from eviction, a session holds a *lease*: references to the full blocks of its tokens.

The total size of all leases is limited. If a request would otherwise wait or be preempted, leases are
shortened from their ends, beginning with the least recently used session.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from mmengine.request import MediaItem, num_before

NO_BLOCKS = np.zeros(0, np.int32)
NO_REQUEST = ""
IDLE = "idle"  # the reason in SESSIONCLOSED for a session that was idle too long


class Chunk(NamedTuple):
    """The tokens that a request added to a session. `start`: its first token's position. `num_outputs`:
    number of answer tokens at the chunk's end. `num_opening`, `is_anchor` and `film` come from the event
    APPENDED.
    """

    start: int
    num_outputs: int
    num_opening: int
    is_anchor: bool
    film: int = 0


class Place(NamedTuple):
    """Describes how the running request continues its session, with the fields of APPENDED. `num_kept` is at
    most the session's length.
    """

    num_kept: int
    num_opening: int
    is_anchor: bool
    film: int = 0


@dataclass(slots=True, eq=False)
class SessionState:
    """One open session. `tokens`: int32. `live`: the session's unfinished request, or NO_REQUEST.
    `leased`: the leased blocks in order, int32. `used`: the value of `Sessions.clock` after the
    session's last lease.
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
    num_grown: int = 0  # number of requests that became part of the session
    is_settled: bool = False  # whether LEASED was applied for the request that is about to end

    def before(self, num_kept: int) -> tuple[MediaItem, ...]:
        """Return the media within the session's first `num_kept` tokens."""
        return self.media[: num_before(self.media, num_kept)]


class Sessions:
    """The open sessions by id, in the order in which they were opened. Only `evolve` calls methods that
    change this object.
    """

    def __init__(self) -> None:
        self.all: dict[str, SessionState] = {}
        self.of_request: dict[str, SessionState] = {}  # id of an unfinished request -> its session
        self.clock = 0  # number of leases so far

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_leased(self) -> int:
        """The number of leased blocks. A block that two sessions lease counts twice."""
        return sum(len(session.leased) for session in self.all.values())

    def leased(self) -> np.ndarray:
        """Return all leased blocks, int32. A block that n sessions lease occurs n times."""
        return np.concatenate([NO_BLOCKS, *(session.leased for session in self.all.values())])

    def by_age(self) -> list[SessionState]:
        """Return the sessions with leases, in the order in which leases are shortened.

        Sessions without an unfinished request come first, then sessions with such a request. Each group
        begins with the least recently used session.
        """
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
        """Record that `request_id` is the session's unfinished request."""
        session.live, session.place = request_id, place
        self.of_request[request_id] = session

    def end(self, request_id: str) -> SessionState | None:
        """Record that the request has ended. Returns the request's session, or None."""
        session = self.of_request.pop(request_id, None)
        if session is not None:
            session.live, session.is_settled = NO_REQUEST, False
        return session

    def digest_parts(self) -> bytes:
        """Return the values that decisions read, encoded for the state's digest."""
        said = [
            (
                *(each.session_id, each.cache_salt, each.live, each.used, each.place),
                *(each.num_grown, _digested(each.media), each.chunks),
                *(each.tokens.tobytes(), each.leased.tobytes()),
            )
            for each in self.all.values()
        ]
        return msgspec.msgpack.encode((self.clock, said))


def _digested(media: Sequence[MediaItem]) -> list[tuple[object, ...]]:
    """Return the items' fields that decisions read. No decision reads `interval`."""
    return [(item.mm_hash, item.modality, item.runs, item.grid) for item in media]

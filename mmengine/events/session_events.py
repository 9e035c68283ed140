"""The events of sessions, requests that grow one another: part of the vocabulary."""

from mmengine.events.event_base import EventBase


class SessionOpened(EventBase, frozen=True):
    """Observation: a session begins, of which requests go on with what those before them said and were shown.
    `idle_ns`: time without a request after which it is closed, 0 for never. `envelope`: what a server keeps
    with it."""

    session_id: str
    cache_salt: str = ""
    idle_ns: int = 0
    envelope: bytes = b""


class Appended(EventBase, frozen=True):
    """Observation, right before the QUEUED of `request_id`: its prompt stands behind the first `num_kept`
    tokens of the session, whose other tokens are forgotten, and the runs of its media are counted from there.
    With its answer it is the session's when it ends by stop or length.

    `num_opening`: of its tokens the first ones, which belong to what stands before them: where that is
    dropped, so are they. `is_anchor`: it stays when others are dropped. `film`: 1: its end is left open, for
    more frames of a video; 2: it begins in one that was left open, too."""

    session_id: str
    request_id: str
    num_kept: int
    num_opening: int = 0
    is_anchor: bool = False
    film: int = 0


class Leased(EventBase, frozen=True):
    """Decision: a request of the session is over, and its full blocks stay with the session: the first
    `num_kept` that it has, then `blocks` (int32). Others that it had go back."""

    session_id: str
    num_kept: int
    blocks: bytes


class LeaseTaken(EventBase, frozen=True):
    """Decision: of the blocks that a session has only the first `num_kept` stay; what was in the others may
    have to be computed again. `reason`: "no free blocks", or "session_blocks", the limit of all leases."""

    session_id: str
    num_kept: int
    reason: str


class SessionClosed(EventBase, frozen=True):
    """Observation: the session is over, because somebody said so ("closed"), or nobody asked for so long
    ("idle")."""

    session_id: str
    reason: str = "closed"

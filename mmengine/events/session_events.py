"""Events about sessions, a part of vocabulary.py. In a session each request continues the one before."""

from mmengine.events.event_base import EventBase


class SessionOpened(EventBase, frozen=True):
    """Observation: a session begins. Its requests continue the prompts and answers before them. `idle_ns`:
    time without a request after which it is closed, 0 for never. `envelope`: a server's data about the
    session.
    """

    session_id: str
    cache_salt: str = ""
    idle_ns: int = 0
    envelope: bytes = b""


class Appended(EventBase, frozen=True):
    """Observation, right before the QUEUED of `request_id`: the request continues the session after its first
    `num_kept` tokens. The session's other tokens are forgotten. Media runs count from there. Prompt and
    answer join the session if the request ends by stop or length.

    `num_opening`: how many of its first tokens belong to the text before them and are dropped with it.
    `is_anchor`: it stays when other requests are dropped. `film`: 1: its end stays open for more video
    frames; 2: it also continues an open video.
    """

    session_id: str
    request_id: str
    num_kept: int
    num_opening: int = 0
    is_anchor: bool = False
    film: int = 0


class Leased(EventBase, frozen=True):
    """Decision: a session's request has ended, and the session keeps its full blocks: the first `num_kept`
    that it has, then `blocks` (int32). It releases its other blocks.
    """

    session_id: str
    num_kept: int
    blocks: bytes


class LeaseTaken(EventBase, frozen=True):
    """Decision: a session keeps only the first `num_kept` blocks of its lease. The contents of the others may
    have to be computed again. `reason`: "no free blocks", or "session_blocks", the limit for all leases.
    """

    session_id: str
    num_kept: int
    reason: str


class SessionClosed(EventBase, frozen=True):
    """Observation: the session is closed, by a caller ("closed") or because it was not used ("idle")."""

    session_id: str
    reason: str = "closed"

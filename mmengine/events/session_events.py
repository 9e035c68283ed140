"""Events about sessions, in which each request continues the previous request. vocabulary.py includes these
events.
"""

from mmengine.events.event_base import EventBase


class SessionOpened(EventBase, frozen=True):
    """Observation: a session begins. Each of its requests continues the previous prompts and answers.

    `cache_salt`: sessions with different salts share no cache entry. `idle_ns`: after this time without a
    request, the session is closed; 0: never. `envelope`: a server's data about the session.
    """

    session_id: str
    cache_salt: str = ""
    idle_ns: int = 0
    envelope: bytes = b""


class Appended(EventBase, frozen=True):
    """Observation, logged right before the QUEUED of `request_id`: the request continues the session.

    `num_kept`: the request continues after the session's first `num_kept` tokens. The session forgets its
    other tokens. The positions of the request's media are relative to token `num_kept`. The prompt and the
    answer become part of the session if the request ends with the reason "stop" or "length".

    `num_opening`: number of leading tokens that connect the request with the previous turn, such as the
    end-of-turn token and the new turn's header. These tokens are dropped if the previous turn is dropped.
    `is_anchor`: the request's tokens stay when a full session drops older tokens. `film`: 0 if no
    video is open, 1 if the request ends inside a video, so that the next request may add frames, and 2 if the
    request also begins inside a video.
    """

    session_id: str
    request_id: str
    num_kept: int
    num_opening: int = 0
    is_anchor: bool = False
    film: int = 0


class Leased(EventBase, frozen=True):
    """Decision: before a request ends, the session leases the request's full blocks. The lease protects these
    blocks from eviction. The new lease has the old lease's first `num_kept` blocks, followed by `blocks`
    (int32). The old lease's other blocks are released.
    """

    session_id: str
    num_kept: int
    blocks: bytes


class LeaseTaken(EventBase, frozen=True):
    """Decision: a session keeps only the first `num_kept` blocks in its lease. The lease's other blocks can
    be evicted. `reason`: "no free blocks", or "session_blocks" if all leases together have more blocks than
    the setting `session_blocks` allows.
    """

    session_id: str
    num_kept: int
    reason: str


class SessionClosed(EventBase, frozen=True):
    """Observation: the session is closed. `reason`: "closed" if a caller closed the session, or "idle" if no
    request used the session for its `idle_ns`.
    """

    session_id: str
    reason: str = "closed"

"""The events in vocabulary.py about block stores."""

from mmengine.events.event_base import EventBase


class Offered(EventBase, frozen=True):
    """Observation: a block store has the KV for a waiting request's first `num_blocks` blocks; 0: the
    store has none of them. `items`: encoder outputs that the store's reply contained: (index in the request's
    media, 64 bits of the output's digest). The encoder does not compute these items.
    """

    request_id: str
    num_blocks: int
    items: tuple[tuple[int, bytes], ...] = ()


class Fetched(EventBase, frozen=True):
    """Decision: a waiting request fetches n of its blocks from the store into `blocks` (int32 [n]).
    They follow the prefix hits `cached` (int32), which the request holds until the fetch ends.
    """

    request_id: str
    cached: bytes
    blocks: bytes


class Arrived(EventBase, frozen=True):
    """Observation: a request's next fetched blocks have arrived. The open step, or the next step if none
    is open, copies them to the device. `digests`: 64 bits of each block's digest.
    """

    request_id: str
    digests: bytes


class Lost(EventBase, frozen=True):
    """Observation: the store will not send the blocks that a request still waits for, so the engine computes
    them. `reason`: "deadline", or the store's error.
    """

    request_id: str
    reason: str

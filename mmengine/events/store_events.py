"""The events about block stores (caches of KV blocks outside the process). vocabulary.py lists all events."""

from mmengine.events.event_base import EventBase


class Offered(EventBase, frozen=True):
    """Observation: a block store has the KV for a waiting request's first `num_blocks` blocks. 0: the store
    has none.

    `items`: (index in the request's media, 64 bits of the output's digest) for encoder outputs in the store's
    reply. The encoder does not compute these items.
    """

    request_id: str
    num_blocks: int
    items: tuple[tuple[int, bytes], ...] = ()


class Fetched(EventBase, frozen=True):
    """Decision: a waiting request fetches n of its blocks from the store into `blocks` (int32 [n]).

    The fetched blocks follow the prefix hits `cached` (int32). The request holds all these blocks until the
    fetch ends.
    """

    request_id: str
    cached: bytes
    blocks: bytes


class Arrived(EventBase, frozen=True):
    """Observation: a request's next fetched blocks have arrived. `digests`: 64 bits of each block's digest.

    The open step copies these blocks to the device. If no step is open, the next step copies them.
    """

    request_id: str
    digests: bytes


class Lost(EventBase, frozen=True):
    """Observation: a request's missing blocks will not arrive, and the engine computes them. `reason`:
    "deadline", or the store's error.
    """

    request_id: str
    reason: str

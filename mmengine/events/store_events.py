"""Events about block stores, a part of vocabulary.py."""

from mmengine.events.event_base import EventBase


class Offered(EventBase, frozen=True):
    """Observation: a store has the KV for the first `num_blocks` blocks of a waiting request; 0: nothing
    useful. `items`: encoder outputs that came with the answer, by their index in the request's media, with 64
    bits of each output's digest. They are not computed.
    """

    request_id: str
    num_blocks: int
    items: tuple[tuple[int, bytes], ...] = ()


class Fetched(EventBase, frozen=True):
    """Decision: a waiting request fetches its blocks [`first`, `first` + n) from the store into the n
    `blocks` (int32). `cached`: prefix hits before them, held until the fetch ends.
    """

    request_id: str
    cached: bytes
    blocks: bytes


class Arrived(EventBase, frozen=True):
    """Observation: the next fetched blocks of a request have arrived; `digests` has 64 bits for each. The
    open or next step copies them to the device.
    """

    request_id: str
    digests: bytes


class Lost(EventBase, frozen=True):
    """Observation: the store will not send the blocks that a request still waits for. `reason`: "deadline",
    or the store's error. The request computes them.
    """

    request_id: str
    reason: str

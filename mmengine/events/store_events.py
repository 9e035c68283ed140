"""Events of stores of blocks; vocabulary.py says what events are."""

from mmengine.events.event_base import EventBase


class Offered(EventBase, frozen=True):
    """Observation: a store has the KV of the first `num_blocks` blocks of a request that waits for that
    answer; 0: nothing of use. `items`: encoder outputs that came of it with the answer, by their number among
    the request's media, with 64 bits of what came for each: they are not computed."""

    request_id: str
    num_blocks: int
    items: tuple[tuple[int, bytes], ...] = ()


class Fetched(EventBase, frozen=True):
    """Decision: blocks [`first`, `first` + n) of a request that waits are fetched from the store into the n
    `blocks` (int32). `cached`: hits of this engine before them, which are held until the fetch is over."""

    request_id: str
    cached: bytes
    blocks: bytes


class Arrived(EventBase, frozen=True):
    """Observation: of the blocks that are being fetched for a request the next ones are here; `digests` has
    64 bits of what came for each. The open step, or the next, copies them to the device."""

    request_id: str
    digests: bytes


class Lost(EventBase, frozen=True):
    """Observation: what a request waits for of the store, and has not arrived, does not come: "deadline", or
    what the store said. It is computed."""

    request_id: str
    reason: str

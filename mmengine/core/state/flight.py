"""A step between its last decision and its result."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmengine.core.state.draft_arbiter import NO_DRAFTERS
from mmengine.core.state.request_state import RequestState
from mmengine.request import Request


class Part(NamedTuple):
    """Of an item that is encoded over several steps, by its number in a request: the work from `start` to
    `until` of all that it takes."""

    request_id: str
    key: bytes
    item: int
    start: int
    until: int


def work_done(part: Part | None, key: bytes) -> int:
    """Of the item with this key, by the parts before; `part`: the last of the item under way."""
    return part.until if part is not None and part.key == key else 0


@dataclass(slots=True, eq=False)
class Flight:
    """What must be known of a step when its result comes, or when it fails.

    With several steps in flight a row may be in more than one of them, so what the columns say of it
    then belongs to the youngest.
    """

    step: int
    rows: np.ndarray  # intp, in scheduling order
    sampled: np.ndarray  # intp, those of them that give tokens
    num_computed: np.ndarray | None  # int32, of `rows` when it has run; None: what the columns say
    num_tokens: int  # computed in it, over all rows
    filled: list[np.ndarray] = field(default_factory=list)  # blocks whose content it completes
    encoded: list[tuple[bytes, Request, int]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)  # encoder keys that its executor is told to drop
    swapped: list[RequestState] = field(default_factory=list)  # whose KV it copies to the host
    asked: int = NO_DRAFTERS  # of a dispatched step: up to which number drafters may draft behind it
    part_of: str = ""  # the request of whose item it computes a part
    kept: list[np.ndarray] = field(default_factory=list)  # states, as `step_kept`

"""Describes steps in flight: steps whose decisions are complete and whose results have not returned."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmengine.core.state.draft_arbiter import NO_DRAFTERS
from mmengine.core.state.request_state import RequestState
from mmengine.request import Request


class Part(NamedTuple):
    """An item's part that is encoded over several steps: the work from `start` to `until`, in the units of
    encoder_cache/work.py. `item`: the item's index in the request's media.
    """

    request_id: str
    key: bytes
    item: int
    start: int
    until: int


def work_done(part: Part | None, key: bytes) -> int:
    """Return how much work on the item with this key is done. `part`: the last scheduled part of any
    item, or None.
    """
    return part.until if part is not None and part.key == key else 0


@dataclass(slots=True, eq=False)
class Flight:
    """A dispatched step, with the values that the fold needs for its result or its failure.

    A row may be in several steps in flight. The state's columns then describe the row after the last
    dispatched step.
    """

    step: int
    rows: np.ndarray  # intp, in scheduling order
    sampled: np.ndarray  # intp, the rows that give tokens
    num_computed: (
        np.ndarray | None
    )  # int32, computed tokens of `rows` after the step; None: as in the columns
    num_tokens: int  # tokens that the step computes, over all rows
    filled: list[np.ndarray] = field(default_factory=list)  # blocks whose content the step completes
    encoded: list[tuple[bytes, Request, int]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)  # encoder keys that the executor is told to drop
    swapped: list[RequestState] = field(default_factory=list)  # requests whose KV the step copies to the host
    draft_level: int = NO_DRAFTERS  # the highest drafter number that may draft after the step
    # int32, how many drafts each sampled row verifies, by vLLM's asynchronous rules; None: see the columns
    num_drafts: np.ndarray | None = None
    part_of: str = ""  # the request for whose item the step computes a part, or ""
    kept: list[np.ndarray] = field(default_factory=list)  # kept states, as in `step_kept`

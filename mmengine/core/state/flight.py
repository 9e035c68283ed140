"""Describes steps in flight: steps that were dispatched and whose results have not returned."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmengine.core.state.draft_arbiter import NO_DRAFTERS
from mmengine.core.state.request_state import RequestState
from mmengine.request import Request


class Part(NamedTuple):
    """A step's part in encoding a media item over several steps. `start`, `until`: the finished work before
    and after the step, in the units of encoder_cache/work.py (a unit is the time that a patch takes without
    attention). `item`: the item's index in the request's media.
    """

    request_id: str
    key: bytes
    item: int
    start: int
    until: int


def work_done(part: Part | None, key: bytes) -> int:
    """Return how much encoder work is done for the item with this key. `part`: the last scheduled part of any
    item, or None.
    """
    return part.until if part is not None and part.key == key else 0


@dataclass(slots=True, eq=False)
class Flight:
    """A dispatched step, with the values for applying its result or its failure.

    The state's columns describe each row after the last dispatched step, which may be a later step.
    """

    step: int
    rows: np.ndarray  # intp, in scheduling order
    sampled: np.ndarray  # intp, the rows that sample tokens
    # int32, computed tokens for each of `rows` after the step; None: as in the state's columns
    num_computed: np.ndarray | None
    num_tokens: int  # number of tokens that the step computes for all rows
    filled: list[np.ndarray] = field(default_factory=list)  # blocks whose content is complete after the step
    encoded: list[tuple[bytes, Request, int]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)  # encoder keys that the executor must drop
    swapped: list[RequestState] = field(default_factory=list)  # requests whose KV the step copies to the host
    draft_level: int = NO_DRAFTERS  # drafters up to this number may draft after the step
    # int32, number of drafts to verify per sampled row; set only by vLLM's asynchronous rules
    num_drafts: np.ndarray | None = None
    part_of: str = ""  # id of the request with a media item that the step encodes in part, or ""
    # recurrent states that the step keeps: int32 [n, 3], (row, number of tokens in its state, slot)
    kept: list[np.ndarray] = field(default_factory=list)
    # int32, number of tokens to compute for each of `rows`; set only by vLLM's rules for block groups
    num_scheduled: np.ndarray | None = None

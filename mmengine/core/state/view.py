"""A read-only view of the state, for the functions that make decisions."""

from collections.abc import Mapping, Sequence

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.state.columns import Columns, ReadOnlyArray
from mmengine.core.state.flight import Part
from mmengine.core.state.policy import Policy
from mmengine.core.state.read_only import (
    AdaptersView,
    BlocksView,
    Current,
    EncoderCacheView,
    FlightView,
    GoodputView,
    GrammarSlotsView,
    RequestView,
    RunningView,
    SessionsView,
    StatesView,
    TenantsView,
    WindowsView,
)
from mmengine.core.state.state import State
from mmengine.events.vocabulary import FoldConstants
from mmengine.request import Request


class View(Columns[ReadOnlyArray], RunningView):
    """A read-only view of a State. State explains the attributes."""

    config: EngineConfig
    policy: Policy
    block_size: int
    content_width: int
    num_groups: int
    has_lazy_windows: bool
    free_rows: Sequence[int]
    requests: Mapping[str, RequestView]
    waiting: Sequence[RequestView]
    tenants: TenantsView
    blocks: BlocksView
    windows: WindowsView
    encoder: EncoderCacheView
    states: StatesView
    adapters: AdaptersView
    sessions: SessionsView
    grammar_slots: GrammarSlotsView
    cancelled: Sequence[str]
    grammar_failed: Sequence[str]
    suspects: Mapping[str, None]
    stale: Mapping[int, tuple[RequestView, bool]]
    stopped: Sequence[str]
    fetching: Mapping[str, None]
    thrashing: Sequence[str]
    flights: Sequence[FlightView]
    constants: Current[FoldConstants]
    num_with_media: Current[int]
    num_prefills: Current[int]
    num_large: Current[int]
    part: Current[Part | None]
    step_part: Current[Part | None]
    work_left: Current[int]
    has_drafts: Current[bool]
    verifies: Current[bool]
    resetting: Current[bool]
    step: Current[int]
    last_rows: Current[ReadOnlyArray]
    free_host_blocks: Current[ReadOnlyArray]
    goodput: Current[GoodputView | None]
    is_open: Current[bool]
    preempted_in_step: Current[bool]
    tokens_left: Current[int]
    encoder_left: Current[int]
    num_decided: Current[int]
    made_room_for: Current[tuple[int, int]]
    step_rows: Current[ReadOnlyArray]
    step_encoded: Current[Sequence[tuple[bytes, Request, int]]]
    step_evicted: Current[Sequence[bytes]]
    step_fetched: Current[Sequence[tuple[str, ReadOnlyArray]]]
    step_copies: Current[Mapping[str, Sequence[ReadOnlyArray]]]
    step_kept: Current[Sequence[ReadOnlyArray]]
    _target: State

    def __init__(self, state: State):
        self._show(state)

    def due(self) -> np.ndarray:
        """Return what `State.due` returns."""
        return self._target.due()

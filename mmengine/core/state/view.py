"""The state as those see it who decide: they read everything, and write nothing."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import get_type_hints

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.state.columns import (
    COLUMNS,
    STATE_COLUMNS,
    WIDE_COLUMNS,
    Columns,
    ReadOnlyArray,
    never_assigned,
)
from mmengine.core.state.flight import Part
from mmengine.core.state.policy import Policy
from mmengine.core.state.reading import (
    AdaptersView,
    BlocksView,
    EncoderCacheView,
    Face,
    FlightView,
    GoodputView,
    KeptGrammarsView,
    RequestsByRow,
    RequestView,
    SessionsView,
    StatesView,
    read_only,
)
from mmengine.core.state.state import State
from mmengine.events.vocabulary import FoldConstants
from mmengine.request import Request


@never_assigned
class _Replaced:
    """What a state replaces as it goes: a view reads it of the state each time."""

    constants: FoldConstants
    num_with_media: int
    num_prefills: int
    num_large: int
    part: Part | None
    step_part: Part | None
    work_left: int
    running: ReadOnlyArray
    has_drafts: bool
    verifies: bool
    resetting: bool
    step: int
    last_rows: ReadOnlyArray
    free_host_blocks: ReadOnlyArray
    goodput: GoodputView | None
    is_open: bool
    preempted_in_step: bool
    tokens_left: int
    encoder_left: int
    scan_from: int
    num_decided: int
    made_room_for: tuple[int, int]
    step_rows: ReadOnlyArray
    step_encoded: Sequence[tuple[bytes, Request, int]]
    step_evicted: Sequence[bytes]
    step_fetched: Sequence[tuple[str, ReadOnlyArray]]
    step_copies: Mapping[str, Sequence[ReadOnlyArray]]
    step_kept: Sequence[ReadOnlyArray]


@never_assigned
class View(Columns[ReadOnlyArray], _Replaced, Face):
    """The names of a State, none of which can be written. What they mean is said there."""

    config: EngineConfig
    policy: Policy
    block_size: int
    content_width: int
    requests_by_row: RequestsByRow
    free_rows: Sequence[int]
    requests: Mapping[str, RequestView]
    waiting: Sequence[RequestView]
    blocks: BlocksView
    encoder: EncoderCacheView
    states: StatesView
    adapters: AdaptersView
    sessions: SessionsView
    kept_grammars: KeptGrammarsView
    cancelled: Sequence[str]
    grammar_failed: Sequence[str]
    suspects: Mapping[str, None]
    fetching: Mapping[str, None]
    thrashing: Sequence[str]
    flights: Sequence[FlightView]
    _state: State

    def __init__(self, state: State):
        Face.__init__(
            self,
            **{name: read_only(getattr(state, name)) for name in (*COLUMNS, *STATE_COLUMNS, *WIDE_COLUMNS)},
            config=state.config,
            policy=state.policy,
            block_size=state.block_size,
            content_width=state.content_width,
            requests_by_row=read_only(state.requests_by_row),
            free_rows=state.free_rows,
            requests=MappingProxyType(state.requests),
            waiting=state.waiting,
            blocks=BlocksView(state.blocks),
            encoder=EncoderCacheView(state.encoder),
            states=StatesView(state.states, state.blocks),
            adapters=AdaptersView(state.adapters),
            sessions=SessionsView(state.sessions),
            kept_grammars=state.kept_grammars,
            cancelled=state.cancelled,
            grammar_failed=state.grammar_failed,
            suspects=MappingProxyType(state.suspects),
            fetching=MappingProxyType(state.fetching),
            thrashing=state.thrashing,
            flights=state.flights,
            _state=state,
        )

    def due(self) -> np.ndarray:
        """See State.due."""
        return self._state.due()


for _name in get_type_hints(_Replaced):  # read without a call of Python
    setattr(View, _name, property(attrgetter(f"_state.{_name}")))

"""Copies an engine's state into a Body, the content of a snapshot."""

from collections.abc import Callable

import numpy as np

from mmengine.core.snapshot.body import (
    NAMES,
    PLAIN,
    Adapters,
    Body,
    Known,
    Pool,
    Session,
    States,
    Step,
    Windows,
)
from mmengine.core.snapshot.field_forms import ints, take_fields
from mmengine.core.state.columns import COLUMNS, STATE_COLUMNS
from mmengine.core.state.digest import state_digest
from mmengine.core.state.flight import Flight
from mmengine.core.state.grammar_slots import GrammarSlots
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.request_state import RequestState, queued_of
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.request import Request


def body_of(state: State, started: ev.Started, sequence: int) -> Body:
    """Return a copy of the state as a snapshot's body. `started`: the log's first event. `sequence`: the
    number of the last applied record.
    """
    body = body_without_requests(state, started, sequence)
    body.digest = state_digest(state)
    body.requests = tuple(known_of(each, state.grammar_slots) for each in state.requests.values())
    body.waiting = tuple(req_state.request.request_id for req_state in state.waiting)
    return body


def body_without_requests(state: State, started: ev.Started, sequence: int) -> Body:
    """Return a copy of the state without live requests, waiting queue and digest. For the arguments, see
    `body_of`.
    """
    places = {id(req_state.request): place for place, req_state in enumerate(state.requests.values())}
    gone: list[ev.Queued] = []
    kept = state.grammar_slots

    def place_of(request: Request) -> int:
        if id(request) not in places:
            places[id(request)] = len(state.requests) + len(gone)
            gone.append(kept.named(queued_of(request)))
        return places[id(request)]

    held = np.flatnonzero(state.num_blocks).tolist()
    return Body(
        sequence=sequence,
        digest=b"",
        started=started,
        plain={name: np.asarray(getattr(state, name)).item() for name in PLAIN},
        names={name: tuple(getattr(state, name)) for name in NAMES},
        suspects=tuple(state.suspects),
        columns={name: getattr(state, name).tobytes() for name in COLUMNS},
        tokens=_tokens_of(state, started),
        tables=tuple((row, state.block_table[row, : state.num_blocks[row]].tobytes()) for row in held),
        requests=(),
        open=_step_of(state, state.open_step(), place_of),
        flights=tuple(_step_of(state, flight, place_of) for flight in state.flights),
        gone=tuple(gone),
        waiting=(),
        free_rows=tuple(state.free_rows),
        running=ints(state.running),
        last_rows=ints(state.last_rows),
        pool=_pool_of(state),
        encoder=tuple((key, e.size, e.references, e.valid) for key, e in state.encoder.entries.items()),
        idle=tuple(state.encoder.idle),
        dropped=tuple(state.encoder.dropped),
        free_host_blocks=ints(state.free_host_blocks),
        history=state.history.digest(),
        copies={name: tuple(map(ints, parts)) for name, parts in state.step_copies.items()},
        made_room_for=state.made_room_for,
        leaving=tuple((row, tuple(keys)) for row, keys in state.leaving.items()),
        goodput=state.goodput.saved() if state.goodput is not None else None,
        grammar_slots=kept.saved(),
        work_left=state.work_left,
        part=state.part,
        step_part=state.step_part,
        states=_states_of(state) if state.config.num_state_slots else None,
        adapters=_adapters_of(state) if state.config.max_loras else None,
        sessions=tuple(take_fields(Session, session) for session in state.sessions.all.values()),
        sessions_clock=state.sessions.clock,
        num_prefills=state.num_prefills,
        tenants=state.tenants.saved(),
        turns=state.tenants.turns,
        windows=_windows_of(state, held) if state.num_groups > 1 else None,
    )


def _windows_of(state: State, rows: list[int]) -> Windows:
    tables, index = state.windows, state.blocks.windows
    blocks = index.recorded()
    saved = (
        (row, tables.first_held[:, row].tobytes(), tables.held_by(row, state.num_blocks[row]).tobytes())
        for row in rows
    )
    contents = state.blocks.window_content.tobytes() if state.has_lazy_windows else b""
    return Windows(tuple(saved), ints(blocks), index.keys[blocks].tobytes(), contents)


def _adapters_of(state: State) -> Adapters:
    pool = state.adapters
    entries = ((key, entry.size, entry.references) for key, entry in pool.cache.entries.items())
    names = tuple(pool.known.values()), tuple(pool.nameless.values())
    return Adapters(tuple(entries), tuple(pool.cache.idle), dict(pool.of_row), *names)


def _states_of(state: State) -> States:
    rows = {name: getattr(state, name).tobytes() for name in STATE_COLUMNS}
    held, content, block, used = (column.tobytes() for column in state.states.columns())
    return States(rows, held, content, block, used, state.states.clock)


def _tokens_of(state: State, started: ev.Started) -> tuple[tuple[int, bytes], ...]:
    """Return (row, token ids) for the running rows.

    For vLLM's asynchronous scheduler, return all rows with tokens, because this scheduler may also read
    tokens that belong to no running request.
    """
    if not started.host or state.config.max_in_flight == 1:
        return tuple((row, _row_tokens(state, row)) for row in state.running.tolist())
    rows, places = np.nonzero(state.token_ids)
    ends = np.zeros(len(state.token_ids), np.int64)
    np.maximum.at(ends, rows, places + 1)
    return tuple((row, state.token_ids[row, : ends[row]].tobytes()) for row in np.flatnonzero(ends).tolist())


def _row_tokens(state: State, row: int) -> bytes:
    """Return the row's tokens and its drafts or placeholders as int32 bytes."""
    behind = max(int(state.num_drafts[row]), int(state.scheduled_drafts[row]))
    return state.token_ids[row, : state.num_tokens[row] + behind].tobytes()


def known_of(req_state: RequestState, kept: GrammarSlots) -> Known:
    """Return a copy of a live request, with its grammar as a slot number. `kept`: the stored grammars."""
    outputs = req_state.tokens[req_state.num_prompt :].tobytes()
    return take_fields(Known, req_state, queued=kept.named(queued_of(req_state.request)), outputs=outputs)


def _step_of(state: State, flight: Flight, place_of: Callable[[Request], int]) -> Step:
    # An ended request has no host blocks, so its swap is not saved.
    named = ((req_state.request.request_id, req_state) for req_state in flight.swapped)
    return take_fields(
        Step,
        flight,
        encoded=tuple((key, place_of(request), index) for key, request, index in flight.encoded),
        swapped=tuple(name for name, req_state in named if state.requests.get(name) is req_state),
    )


def _pool_of(state: State) -> Pool:
    pool, index = state.blocks, state.blocks.index
    blocks = np.flatnonzero(index.content != NO_CONTENT)
    stack, queue = pool.free_list.lines()
    content, parent, tokens, key = (column[blocks].tobytes() for column in index.columns())
    return Pool(
        references=pool.references.tobytes(),
        stack=stack.tobytes(),
        queue=queue.tobytes(),
        blocks=ints(blocks),
        content=content,
        parent=parent,
        tokens=tokens,
        key=key,
        extra={int(block): extra for block, extra in index.extra.items()},
        twins=tuple(tuple(twins) for twins in index.twins.values()),
        next_content=index.next_content,
    )

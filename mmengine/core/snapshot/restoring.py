"""Restores a state from a snapshot's body (body.py, Body). For an invalid body the functions raise
ValueError, KeyError, IndexError, TypeError or OverflowError.
"""

import numpy as np

from mmengine.core.snapshot.body import NAMES, PLAIN, Adapters, Body, Known, Pool, States, Step, Windows
from mmengine.core.snapshot.field_forms import array, as_rows, fill_fields
from mmengine.core.state.columns import COLUMNS, STATE_COLUMNS
from mmengine.core.state.flight import Flight
from mmengine.core.state.request_state import NO_ROW, RequestState, request_of
from mmengine.core.state.sessions import SessionState
from mmengine.core.state.state import State
from mmengine.encoder_cache.cache import EncoderCache
from mmengine.request import Request


def fill(state: State, body: Body) -> None:
    """Fill a new state with the values in a body."""
    state.grammar_slots.restore(body.grammar_slots)
    requests = [request_state_of(state, each) for each in body.requests]
    by_id = {each.request.request_id: each for each in requests}
    fill_around(state, body, requests, [by_id[name] for name in body.waiting])


def fill_around(state: State, body: Body, requests: list[RequestState], waiting: list[RequestState]) -> None:
    """Fill a new state with the live requests `requests`, the queue `waiting`, and the other values in
    `body`. The state's grammar slots must be restored already.
    """
    for name in PLAIN:
        setattr(state, name, body.plain[name])
    for name in NAMES:
        getattr(state, name).extend(body.names[name])
    state.suspects.update(dict.fromkeys(body.suspects))
    for name in COLUMNS:
        column = getattr(state, name)
        column[:] = _column(body.columns[name], column.dtype, len(column))
    state.has_drafts, state.verifies = bool(state.num_drafts.any()), bool(state.scheduled_drafts.any())
    for wide, rows in ((state.token_ids, body.tokens), (state.block_table, body.tables)):
        for row, values in rows:
            wide[row, : len(values) // 4] = array(values)
    for req_state in requests:
        _add_request(state, req_state)
    owners = [req_state.request for req_state in requests]
    owners += [request_of(state.grammar_slots.whole(queued)) for queued in body.gone]
    _fill_queue(state, body, waiting)
    state.free_rows[:] = body.free_rows
    state.running, state.last_rows = as_rows(body.running), as_rows(body.last_rows)
    _fill_pool(state, body.pool)
    if state.num_groups > 1:
        _fill_windows(state, body.windows)
    _fill_encoder(state.encoder, body)
    state.free_host_blocks = array(body.free_host_blocks).copy()
    state.history.restore(body.history)
    state.flights.extend(_flight(state, step, owners) for step in body.flights)
    state.leaving.update((row, list(keys)) for row, keys in body.leaving)
    _fill_open(state, body, _flight(state, body.open, owners))
    if state.config.num_state_slots:
        _fill_states(state, body.states)
    if state.config.max_loras:
        _fill_adapters(state, body.adapters)
    for session in body.sessions:
        state.sessions.add(fill_fields(SessionState, session))
    state.sessions.clock, state.num_prefills = body.sessions_clock, body.num_prefills
    if state.goodput is not None:
        if body.goodput is None:
            raise ValueError("it lacks the goodput of drafts")
        state.goodput.restore(body.goodput)


def _fill_queue(state: State, body: Body, waiting: list[RequestState]) -> None:
    for req_state in state.requests.values():
        state.tenants.join(req_state)
        if req_state.row != NO_ROW:
            state.tenants.restore_row(req_state)
    state.waiting.extend(waiting)
    state.tenants.restore_waiting(waiting)
    # Old snapshots without tenants have a single queue. Their `scan_from` counts the waiting requests that
    # the open step has skipped.
    passed = body.plain.get("scan_from", 0)
    state.tenants.restore(body.tenants or ((("", 0, 0, passed),) if passed else ()), body.turns)


def _fill_states(state: State, saved: States | None) -> None:
    if saved is None:
        raise ValueError("it lacks the state slots")
    for name in STATE_COLUMNS:
        column = getattr(state, name)
        column[:] = _column(saved.rows[name], column.dtype, len(column))
    kept = (saved.held, saved.content, saved.block, saved.used)
    columns = zip(state.states.columns(), kept, strict=True)
    filled = tuple(_column(data, column.dtype, len(column)) for column, data in columns)
    state.states.fill(filled, saved.clock)


def _fill_adapters(state: State, saved: Adapters | None) -> None:
    if saved is None:
        raise ValueError("it lacks the adapters")
    pool = state.adapters
    for key, size, references in saved.entries:
        pool.cache.restore(key, size, references, valid=True)
    _fill_idle(pool.cache, saved.idle)
    pool.of_row.update(saved.rows)
    pool.known.update({loaded.adapter.name: loaded for loaded in saved.known})
    pool.nameless.update({loaded.adapter.digest: loaded for loaded in saved.nameless})


def request_state_of(state: State, saved: Known, request: Request | None = None) -> RequestState:
    """Return the live request that `saved` describes. The state's grammar slots must be restored already.
    `request`: replaces the request in `saved.queued`.
    """
    if request is None:
        request = request_of(state.grammar_slots.whole(saved.queued))
    req_state = fill_fields(
        RequestState,
        saved,
        without=("queued", "outputs"),
        request=request,
        tokens=np.concatenate((request.prompt_token_ids, array(saved.outputs))),
        media_keys=state.media_keys_of(request),
    )
    state.weigh_media(req_state)
    return req_state


def _add_request(state: State, req_state: RequestState) -> None:
    name = req_state.request.request_id
    state.num_large += req_state.has_large
    state.requests[name] = req_state
    if req_state.num_fetching:
        state.fetching[name] = None
    if req_state.row != NO_ROW:
        state.requests_by_row[req_state.row] = req_state


def _flight(state: State, saved: Step, owners: list[Request]) -> Flight:
    return fill_fields(
        Flight,
        saved,
        encoded=[(key, owners[place], index) for key, place, index in saved.encoded],
        swapped=[state.requests[name] for name in saved.swapped],
    )


def _fill_open(state: State, body: Body, flight: Flight) -> None:
    state.step_rows, state.step_filled = flight.rows, flight.filled
    state.step_encoded, state.step_swapped = flight.encoded, flight.swapped
    state.step_evicted, state.step_kept = flight.gone[len(body.dropped) :], flight.kept
    state.made_room_for = body.made_room_for
    state.work_left, state.part, state.step_part = body.work_left, body.part, body.step_part
    for name, parts in body.copies.items():
        state.step_copies[name] = [array(part).reshape(-1, 2) for part in parts]


def _fill_pool(state: State, saved: Pool) -> None:
    pool = state.blocks
    pool.references[:] = _column(saved.references, np.dtype(np.int32), state.config.num_blocks)
    pool.free_list.fill(array(saved.stack), array(saved.queue))
    blocks = as_rows(saved.blocks)
    columns = (
        np.frombuffer(saved.content, np.int64),
        np.frombuffer(saved.parent, np.int64),
        array(saved.tokens).reshape(len(blocks), state.content_width),
        np.frombuffer(saved.key, np.uint64),
    )
    pool.index.fill(blocks, columns, saved.extra, saved.twins, saved.next_content)


def _fill_windows(state: State, saved: Windows | None) -> None:
    if saved is None:
        raise ValueError("it lacks the block groups")
    for row, first_held, blocks in saved.rows:
        state.windows.restore_row(row, array(first_held), array(blocks))
    state.blocks.windows.restore(as_rows(saved.blocks), np.frombuffer(saved.keys, np.int64))
    if state.has_lazy_windows:
        contents = _column(saved.contents, np.dtype(np.int64), state.config.num_blocks)
        state.blocks.window_content[:] = contents


def _fill_encoder(cache: EncoderCache, body: Body) -> None:
    for key, size, references, valid in body.encoder:
        cache.restore(key, size, references, valid)
    _fill_idle(cache, body.idle)
    cache.dropped.extend(body.dropped)


def _fill_idle(cache: EncoderCache, idle: tuple[bytes, ...]) -> None:
    if sorted(idle) != sorted(cache.idle):
        raise ValueError("a cache's idle entries differ from its unreferenced entries")
    cache.idle.clear()
    cache.idle.update(dict.fromkeys(idle))


def _column(data: bytes, dtype: np.dtype, length: int) -> np.ndarray:
    values = np.frombuffer(data, dtype)
    if len(values) != length:
        raise ValueError(f"a column has {len(values)} values in place of {length}")
    return values

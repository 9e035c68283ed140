"""From the body of a snapshot to a state. What is wrong with it raises ValueError, KeyError, IndexError,
TypeError or OverflowError."""

import numpy as np

from mmengine.core.snapshot.body import NAMES, PLAIN, Body, Known, Pool, Step
from mmengine.core.state.columns import COLUMNS
from mmengine.core.state.flight import Flight
from mmengine.core.state.free_list import FreeList
from mmengine.core.state.prefix_index import PrefixIndex
from mmengine.core.state.request_state import RequestState, request_of
from mmengine.core.state.state import State
from mmengine.encoder_cache.cache import EncoderCache, encoder_key
from mmengine.request import Request


def fill(state: State, body: Body) -> None:
    for name in PLAIN:
        setattr(state, name, body.plain[name])
    for name in NAMES:
        getattr(state, name).extend(body.names[name])
    state.suspects.update(dict.fromkeys(body.suspects))
    for name in COLUMNS:
        column = getattr(state, name)
        column[:] = _array(body.columns[name], column.dtype, len(column))
    state.has_drafts, state.verifies = bool(state.num_drafts.any()), bool(state.scheduled_drafts.any())
    for wide, rows in ((state.token_ids, body.tokens), (state.block_table, body.tables)):
        for row, values in rows:
            wide[row, : len(values) // 4] = _array(values)
    requests = [_add_request(state, req_state) for req_state in body.requests]
    owners = [req_state.request for req_state in requests] + [request_of(queued) for queued in body.gone]
    state.waiting.extend(state.requests[name] for name in body.waiting)
    state.free_rows[:] = body.free_rows
    state.running, state.last_rows = _rows(body.running), _rows(body.last_rows)
    _fill_pool(state, body.pool)
    _fill_encoder(state.encoder, body)
    state.free_host_blocks = _array(body.free_host_blocks).copy()
    state.history.restore(body.history)
    state.flights.extend(_flight(state, step, owners) for step in body.flights)
    state.leaving.update((row, list(keys)) for row, keys in body.leaving)
    _fill_open(state, body, _flight(state, body.open, owners))
    if state.goodput is not None:
        state.goodput.restore(body.goodput)


def _add_request(state: State, saved: Known) -> RequestState:
    request = request_of(saved.queued)
    req_state = RequestState(
        request,
        saved.arrival,
        np.concatenate((request.prompt_token_ids, _array(saved.outputs))),
        tuple(encoder_key(item.mm_hash, request.cache_salt) for item in request.media),
        saved.rank,
        saved.row,
        saved.preempted,
        saved.num_cached,
        saved.waits_for_grammar,
        _array(saved.host_blocks),
        saved.num_swapped,
        saved.admitted_step,
        saved.idle_preemptions,
        saved.failures,
        saved.isolation_rows,
        saved.cancelled,
        saved.detail,
        set(saved.held_media),
    )
    state.requests[request.request_id] = req_state
    if req_state.row >= 0:
        state.requests_by_row[req_state.row] = req_state
    return req_state


def _flight(state: State, saved: Step, owners: list[Request]) -> Flight:
    return Flight(
        saved.step,
        _rows(saved.rows),
        _rows(saved.sampled),
        None if saved.num_computed is None else _array(saved.num_computed),
        saved.num_tokens,
        list(map(_array, saved.filled)),
        [(key, owners[place], index) for key, place, index in saved.encoded],
        list(saved.gone),
        [state.requests[name] for name in saved.swapped],
        saved.asked,
    )


def _fill_open(state: State, body: Body, flight: Flight) -> None:
    state.step_rows, state.step_filled = flight.rows, flight.filled
    state.step_encoded, state.step_swapped = flight.encoded, flight.swapped
    state.step_evicted = flight.gone[len(body.dropped) :]
    state.made_room_for = body.made_room_for
    for name, parts in body.copies.items():
        state.step_copies[name] = [_array(part).reshape(-1, 2) for part in parts]


def _fill_pool(state: State, saved: Pool) -> None:
    pool, num_blocks = state.blocks, state.config.num_blocks
    pool.references[:] = _array(saved.references, np.int32, num_blocks)
    pool.free_list = FreeList(num_blocks)
    pool.free_list.fill(_array(saved.stack), _array(saved.queue))
    pool.index = PrefixIndex(num_blocks, state.content_width)
    blocks = _rows(saved.blocks)
    columns = (
        _array(saved.content, np.int64),
        _array(saved.parent, np.int64),
        _array(saved.tokens).reshape(len(blocks), state.content_width),
        _array(saved.key, np.uint64),
    )
    pool.index.fill(blocks, columns, saved.extra, saved.twins, saved.next_content)


def _fill_encoder(cache: EncoderCache, body: Body) -> None:
    for key, size, references, valid in body.encoder:
        cache.restore(key, size, references, valid)
    if sorted(body.idle) != sorted(cache.idle):
        raise ValueError("the idle encoder outputs are not those that nobody references")
    cache.idle = dict.fromkeys(body.idle)
    cache.dropped.extend(body.dropped)


def _array(data: bytes, dtype: type = np.int32, length: int | None = None) -> np.ndarray:
    values = np.frombuffer(data, dtype)
    if length is not None and len(values) != length:
        raise ValueError(f"a column has {len(values)} values in place of {length}")
    return values


def _rows(data: bytes) -> np.ndarray:
    return _array(data).astype(np.intp)

"""The only writer of state: applies an event. It makes no choices and never fails on a log that
`verify` accepts; what an event means is said here, in fold_rows and fold_media, and nowhere else."""

from collections.abc import Callable

import numpy as np

from mmengine.core.fold.media import encode, release_media
from mmengine.core.fold.rows import (
    compute,
    deal_blocks,
    drop_host_blocks,
    fill_row,
    free_rows_left,
    leave_row,
    leave_step,
    make_room,
    pad_drafts,
    swap_out,
    take_drafts,
    take_runs,
    weigh_drafts,
)
from mmengine.core.state.flight import Flight
from mmengine.core.state.overlap import asked_behind
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.request_state import RequestState, request_of
from mmengine.core.state.state import BROKEN, CRASHED, LEFT, LOST, NEVER, RUNS_ON, STOPPED, State
from mmengine.events import vocabulary as ev

ISOLATION_SINCE = 2  # decision version


def evolve(state: State, event: ev.Event) -> None:
    _APPLY[type(event)](state, event)
    state.due_places = None


def _started(state: State, event: ev.Started) -> None:
    """The state was made from its settings; what is left are the rules that the log keeps to."""
    state.decision_version = event.decision_version
    state.history.begin(event.decision_version)


def _queued(state: State, event: ev.Queued) -> None:
    request = request_of(event)
    req_state = state.new_request(request)
    req_state.waits_for_grammar = request.grammar is not None
    state.requests[event.request_id] = req_state
    state.history.update(event.prompt)
    state.enqueue(req_state)


def _grammar_ready(state: State, event: ev.GrammarReady) -> None:
    state.requests[event.request_id].waits_for_grammar = False


def _grammar_failed(state: State, event: ev.GrammarFailed) -> None:
    req_state = state.requests[event.request_id]
    req_state.detail = event.detail
    state.grammar_failed.append(event.request_id)


def _cancelled(state: State, event: ev.Cancelled) -> None:
    state.requests[event.request_id].cancelled = event.reason
    state.cancelled.append(event.request_id)


def _scheduled(state: State, event: ev.Scheduled) -> None:
    state.is_open = True
    rows = state.last_rows
    if event.rows is not None:
        rows = np.frombuffer(event.rows, np.int32).astype(np.intp)
    num_tokens = 1 if event.num_tokens is None else np.frombuffer(event.num_tokens, np.int32)
    if event.encode or event.evict:
        encode(state, event.encode, event.evict)
    if event.new_blocks:
        deal_blocks(state, rows, num_tokens, np.frombuffer(event.new_blocks, np.int32))
    if state.config.compat and len(rows):
        state.num_decided = 1 + int(np.argmax(state.running == rows[-1]))
    state.step_rows = np.concatenate((state.step_rows, rows)) if len(state.step_rows) else rows
    if event.num_drafts is not None:
        state.scheduled_drafts[rows] = np.frombuffer(event.num_drafts, np.int32)
        state.verifies = True
    if state.has_drafts:
        state.num_drafts[rows] = 0
    compute(state, rows, num_tokens)


def _admitted(state: State, event: ev.Admitted) -> None:
    state.is_open = True
    req_state = state.requests[event.request_id]
    state.scan_from = state.waiting.index(req_state)
    del state.waiting[state.scan_from]
    row = event.row
    state.free_rows.remove(row)
    cached = np.frombuffer(event.cached_blocks, np.int32)
    new = np.frombuffer(event.new_blocks, np.int32)
    if len(cached):
        state.blocks.share(cached)
    state.blocks.take_new(new)
    computed = len(cached) * state.block_size if event.num_computed < 0 else event.num_computed
    if event.copy is not None:
        state.step_copies["copy"].append(np.array([event.copy], np.int32))
    if event.swap_in:
        pairs = np.stack((req_state.host_blocks, new[: len(req_state.host_blocks)]), axis=1)
        state.step_copies["swap_in"].append(pairs)
    drop_host_blocks(state, req_state)
    fill_row(state, row, req_state, np.concatenate((cached, new)), len(cached), computed)
    encode(state, event.encode, event.evict)
    rows = np.array([row], np.intp)
    if (padding := computed + event.num_tokens - len(req_state.tokens)) > 0:
        pad_drafts(state, row, padding)
    state.running = np.append(state.running, rows)
    state.num_decided = len(state.running)
    state.step_rows = np.append(state.step_rows, rows)
    compute(state, rows, event.num_tokens)


def _close_step(state: State) -> Flight:
    """The open step is whole."""
    flight = state.open_step()
    state.encoder.dropped.clear()
    state.last_rows = flight.rows
    state.scheduled[flight.rows] = 0
    state.step += 1
    state.reset_step()
    return flight


def _dispatched(state: State, event: ev.Dispatched) -> None:
    flight = _close_step(state)
    flight.asked = asked_behind(state, flight.rows)
    state.in_flight[flight.rows] += 1
    state.num_pending[flight.sampled] += 1
    state.flights.append(flight)


def _land(state: State) -> Flight:
    """The oldest step in flight is back; without any, that is the open one."""
    if not state.flights:
        return _close_step(state)
    flight = state.flights.popleft()
    state.in_flight[flight.rows] -= 1
    state.num_pending[flight.sampled] -= 1
    return flight


def _evicted(state: State, event: ev.Evicted) -> None:
    encode(state, (), event.keys)
    for key in event.used:
        state.encoder.touch(key)


def _executed(state: State, event: ev.Executed) -> None:
    flight = _land(state)
    rows, sampled = flight.rows, flight.sampled
    if state.goodput is not None:
        weigh_drafts(state, flight, event)
    state.history.update(event.token_ids)
    tokens = np.frombuffer(event.token_ids, np.int32)
    counts = None if event.counts is None else np.frombuffer(event.counts, np.int32)
    for index, what in event.errors:
        if state.ended[sampled[index]] != LEFT:
            state.ended[sampled[index]] = BROKEN
            state.requests_by_row[sampled[index]].detail = what
    for index, kind in event.stops:
        row = sampled[index]
        if state.ended[row] == LEFT:
            continue
        count = 1 if counts is None else counts[index]
        if state.num_tokens[row] + count <= state.max_total[row]:  # else the limit comes first
            state.ended[row] = STOPPED
            state.requests_by_row[row].detail = kind
    if counts is None:
        whole = sampled
        if event.errors or state.leaving:
            sound = state.ended[sampled] < BROKEN
            whole, tokens = sampled[sound], tokens[sound]
        places = state.num_tokens[whole]
        state.token_ids[whole, places] = tokens
        state.num_tokens[whole] = places + 1
    else:
        take_runs(state, sampled, tokens, counts)
    if state.config.num_draft_tokens:
        # Rejected drafts are rolled back. Where another step is behind, there were none.
        if (state.verifies or event.errors) and not state.flights:
            state.num_computed[sampled] = state.num_tokens[sampled] - 1
        take_drafts(state, rows, sampled, event)
    if state.num_with_media:
        computed = state.num_computed[rows] if flight.num_computed is None else flight.num_computed
        done = state.release_at[rows] <= computed
        for row, reached in zip(rows[done].tolist(), computed[done].tolist(), strict=True):
            release_media(state, row, reached)
    if state.suspects:
        for row in sampled[state.ended[sampled] < BROKEN].tolist():
            state.clear_suspicion(state.requests_by_row[row])
    if state.leaving:
        free_rows_left(state)


def _failed(state: State, event: ev.Failed) -> None:
    """What is in flight behind the step that failed was computed from what it left, and is void too."""
    failed = _land(state)
    void = [failed]
    while state.flights:
        void.append(_land(state))
    for flight in void:
        _forget(state, flight)
    for row in np.unique(np.concatenate([flight.rows for flight in void])).tolist():
        if state.ended[row] != LEFT:
            state.requests_by_row[row].detail = event.error
            state.ended[row] = LOST
    lost = [state.requests_by_row[row] for row in failed.rows.tolist() if state.ended[row] == LOST]
    for req_state in lost:
        _blame(state, req_state, len(failed.rows))
    free_rows_left(state)


def _blame(state: State, req_state: RequestState, num_rows: int) -> None:
    """The request was in a step of `num_rows` that failed."""
    if state.decision_version < ISOLATION_SINCE or state.config.compat:
        req_state.failures += 1
        return
    req_state.failures = req_state.failures + 1 if num_rows == 1 else max(req_state.failures, 1)
    req_state.isolation_rows = max(1, num_rows // 2)
    state.suspects[req_state.request.request_id] = None


def _forget(state: State, flight: Flight) -> None:
    """Nothing of the step can be relied on: what it filled, encoded, copied or dropped."""
    for blocks in flight.filled:
        state.blocks.index.forget(blocks)
    for req_state in flight.swapped:
        drop_host_blocks(state, req_state)
    kept = state.encoder
    for key, _, _ in flight.encoded:
        if key in kept.entries:
            kept.invalidate(key)
    kept.dropped += [key for key in flight.gone if key not in kept.entries and key not in kept.dropped]


def _preempted(state: State, event: ev.Preempted) -> None:
    req_state = state.requests_by_row[event.row]
    gained = int(state.num_tokens[event.row]) > len(req_state.tokens)
    req_state.idle_preemptions = 0 if gained else req_state.idle_preemptions + 1
    if req_state.idle_preemptions == state.config.thrash_limit:
        state.thrashing.append(event.request_id)
    req_state.tokens = state.token_ids[event.row, : state.num_tokens[event.row]].copy()
    if event.mode == "swap":
        swap_out(state, req_state, np.frombuffer(event.host_blocks, np.int32))
    for_room = state.ended[event.row] not in (LOST, CRASHED) and not state.resetting
    if state.scheduled[event.row]:
        leave_step(state, req_state)
    leave_row(state, req_state)
    if event.for_row >= 0:
        make_room(state, event)
    state.num_preempted += 1
    req_state.preempted = state.num_preempted
    state.enqueue(req_state)
    state.preempted_in_step |= for_room


def _finished(state: State, event: ev.Finished) -> None:
    req_state = state.requests.pop(event.request_id, None)
    if req_state is None:
        return  # refused before it was queued
    drop_host_blocks(state, req_state)
    state.clear_suspicion(req_state)
    if req_state.row < 0:
        state.waiting.remove(req_state)
    else:
        # The KV of a broken row may hold NaN: nobody shall hit it. vLLM keeps it.
        if state.ended[req_state.row] == BROKEN and state.config.compat != "vllm":
            state.blocks.index.forget(state.block_table[req_state.row, : state.num_blocks[req_state.row]])
        leave_row(state, req_state)
    for names in (state.cancelled, state.grammar_failed, state.thrashing):
        if event.request_id in names:
            names.remove(event.request_id)


def _delivered(state: State, event: ev.Delivered) -> None:
    """A finished request is forgotten already."""


def _cache_reset(state: State, event: ev.CacheReset) -> None:
    state.blocks.reset_cache()
    state.content[state.running] = NO_CONTENT
    state.resetting = event.preempt_running and len(state.running) > 0


def _recovered(state: State, event: ev.Recovered) -> None:
    """Only tokens and what waits outlive a process: no step comes back, and no KV, no encoder output,
    no block of the host is there any more."""
    while state.flights:
        _land(state)
    if state.is_open:
        _close_step(state)
    state.reset_step()
    free_rows_left(state)
    for req_state in state.requests.values():
        req_state.held_media.clear()
        drop_host_blocks(state, req_state)
    rows = state.running
    state.release_at[rows] = NEVER
    state.encoder.clear()
    state.blocks.reset_cache()
    state.content[rows] = NO_CONTENT
    state.resetting = False
    goes_on = (state.ended[rows] == RUNS_ON) & (state.num_tokens[rows] < state.max_total[rows])
    state.ended[rows[goes_on]] = CRASHED
    for name, why in event.lost:
        state.requests[name].detail = why
        state.grammar_failed.append(name)


def _stalled(state: State, event: ev.Stalled) -> None:
    if event.request_id in state.thrashing:
        state.thrashing.remove(event.request_id)


def _checkpoint(state: State, event: ev.Checkpoint) -> None:
    """A digest says something of the state; the next one is due so many steps later."""
    state.checkpointed_step = state.step


_APPLY: dict[type[ev.Event], Callable[[State, ev.Event], None]] = {
    ev.Started: _started,
    ev.Queued: _queued,
    ev.GrammarReady: _grammar_ready,
    ev.GrammarFailed: _grammar_failed,
    ev.Cancelled: _cancelled,
    ev.Preempted: _preempted,
    ev.Scheduled: _scheduled,
    ev.Admitted: _admitted,
    ev.Evicted: _evicted,
    ev.Dispatched: _dispatched,
    ev.Executed: _executed,
    ev.Failed: _failed,
    ev.Finished: _finished,
    ev.Delivered: _delivered,
    ev.CacheReset: _cache_reset,
    ev.Recovered: _recovered,
    ev.Checkpoint: _checkpoint,
    ev.Stalled: _stalled,
}

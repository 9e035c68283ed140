"""Applies an event to the state. Only this package (fold) writes to a state.

Applying an event makes no decision. For a log that `mmengine log verify` accepts, `evolve` cannot fail.
"""

from typing import assert_never

import numpy as np

from mmengine.core.fold import adapters, fetch, sessions
from mmengine.core.fold.asynchronous import await_stale
from mmengine.core.fold.media import encode, encode_part, leave_part
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
)
from mmengine.core.fold.states import keep, take_state
from mmengine.core.fold.steps import (
    apply_dispatched,
    apply_drafted,
    apply_executed,
    apply_failed,
    close_step,
    land,
)
from mmengine.core.fold.windows import release_skipped
from mmengine.core.state.columns import BROKEN, CRASHED, LOST, NEVER, RUNS_ON, frozen
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.request_state import NO_ROW, request_of
from mmengine.core.state.state import State
from mmengine.core.state.uniform_window import with_skipped
from mmengine.events import vocabulary as ev


def evolve(state: State, event: ev.Event) -> None:
    """Apply the event to the state. Frequent events are matched first."""
    match event:
        case ev.Executed():
            apply_executed(state, event)
        case ev.Scheduled():
            _apply_scheduled(state, event)
        case ev.StatesKept():
            keep(state, event)
        case ev.Encoded():
            encode_part(state, event)
        case ev.Drafted():
            apply_drafted(state, event)
        case ev.Dispatched():
            apply_dispatched(state)
        case ev.Admitted():
            _apply_admitted(state, event)
        case ev.Queued():
            _apply_queued(state, event)
        case ev.Finished():
            _apply_finished(state, event)
        case ev.Delivered() | ev.Noted():
            pass  # no effect: a delivered request left the state when it finished
        case ev.Preempted():
            _apply_preempted(state, event)
        case ev.Checkpoint():
            state.checkpointed_step = state.step  # the next checkpoint is due checkpoint_interval steps later
        case ev.GrammarReady():
            state.requests[event.request_id].waits_for_grammar = False
        case ev.GrammarFailed():
            _apply_grammar_failed(state, event)
        case ev.Cancelled():
            _apply_cancelled(state, event)
        case ev.Evicted():
            _apply_evicted(state, event)
        case ev.Offered():
            fetch.apply_offered(state, event)
        case ev.Fetched():
            fetch.apply_fetched(state, event)
        case ev.Arrived():
            fetch.apply_arrived(state, event)
        case ev.Lost():
            fetch.apply_lost(state, event)
        case ev.AdapterLoaded():
            adapters.apply_loaded(state, event)
        case ev.AdapterUnloaded():
            adapters.apply_unloaded(state, event)
        case ev.Appended():
            sessions.apply_appended(state, event)
        case ev.Leased():
            sessions.apply_leased(state, event)
        case ev.LeaseTaken():
            sessions.apply_lease_taken(state, event)
        case ev.SessionOpened():
            sessions.apply_opened(state, event)
        case ev.SessionClosed():
            sessions.apply_closed(state, event)
        case ev.Failed():
            apply_failed(state, event)
        case ev.CacheReset():
            _apply_cache_reset(state, event)
        case ev.Stalled():
            _apply_stalled(state, event)
        case ev.Recovered():
            _apply_recovered(state, event)
        case ev.Started():
            state.constants = event.constants
        case _:
            assert_never(event)
    state.due_places = None


def _apply_queued(state: State, event: ev.Queued) -> None:
    request = request_of(sessions.with_session_prefix(state, state.grammar_slots.whole(event)))
    state.grammar_slots.keep(event)
    req_state = state.new_request(request)
    req_state.waits_for_grammar = request.grammar is not None
    fetch.ask(state, req_state)
    state.requests[event.request_id] = req_state
    state.tenants.join(req_state)
    state.num_large += req_state.has_large
    state.history.update(event.prompt)
    if event.outputs:
        state.history.update(event.outputs)
    state.enqueue(req_state)


def _apply_grammar_failed(state: State, event: ev.GrammarFailed) -> None:
    req_state = state.requests[event.request_id]
    req_state.detail = event.detail
    state.grammar_failed.append(event.request_id)


def _apply_cancelled(state: State, event: ev.Cancelled) -> None:
    state.requests[event.request_id].cancelled = event.reason
    state.cancelled.append(event.request_id)


def _apply_scheduled(state: State, event: ev.Scheduled) -> None:
    state.is_open = True
    rows = state.last_rows
    if event.rows is not None:
        rows = frozen(np.frombuffer(event.rows, np.int32).astype(np.intp))
    num_tokens = 1 if event.num_tokens is None else np.frombuffer(event.num_tokens, np.int32)
    if event.encode or event.evict:
        encode(state, event.encode, event.evict)
    if state.has_lazy_windows:
        release_skipped(state, rows)
    if event.new_blocks:
        new = np.frombuffer(event.new_blocks, np.int32)
        deal_blocks(state, rows, num_tokens, new, event.block_counts)
    if event.num_decided:
        state.num_decided = event.num_decided
    state.step_rows = frozen(np.concatenate((state.step_rows, rows))) if len(state.step_rows) else rows
    if event.num_drafts is not None:
        state.scheduled_drafts[rows] = np.frombuffer(event.num_drafts, np.int32)
        state.verifies = True
    if state.has_drafts:
        state.num_drafts[rows] = 0
    compute(state, rows, num_tokens)


def _apply_admitted(state: State, event: ev.Admitted) -> None:
    state.is_open = True
    req_state = state.requests[event.request_id]
    state.waiting.remove(req_state)
    row = event.row
    state.tenants.admit(req_state, row)
    state.free_rows.remove(row)
    cached = np.frombuffer(event.cached_blocks, np.int32)
    new = np.frombuffer(event.new_blocks, np.int32)
    if len(cached):
        state.blocks.share(cached)
    state.blocks.take_new(new)
    computed = len(cached) * state.block_size if event.num_computed == ev.AS_CACHED else event.num_computed
    if state.num_groups > 1:
        cached, new = state.windows.fill_row(row, cached, new, computed)
    else:
        cached = with_skipped(state.config, cached, computed)
    if event.copy is not None:
        state.step_copies["copy"].append(np.array([event.copy], np.int32))
    if event.swap_in:
        pairs = np.stack((req_state.host_blocks, new[: len(req_state.host_blocks)]), axis=1)
        state.step_copies["swap_in"].append(pairs)
    drop_host_blocks(state, req_state)
    req_state.num_offered = 0
    fill_row(state, row, req_state, np.concatenate((cached, new)), len(cached), computed)
    if isinstance(event, ev.AdmittedWithState) and state.config.num_state_slots:
        take_state(state, event, computed)
    if isinstance(event, ev.AdmittedWithAdapter) and req_state.request.adapter is not None:
        state.adapters.take(row, req_state.request.adapter, event.adapters_out)
    encode(state, event.encode, event.evict)
    rows = np.array([row], np.intp)
    if (padding := computed + event.num_tokens - len(req_state.tokens)) > 0:
        pad_drafts(state, row, padding)
    state.running = frozen(np.append(state.running, rows))
    state.num_decided = len(state.running)
    state.step_rows = frozen(np.append(state.step_rows, rows))
    compute(state, rows, event.num_tokens)


def _apply_evicted(state: State, event: ev.Evicted) -> None:
    encode(state, (), event.keys)
    for key in event.used:
        state.encoder.touch(key)


def _apply_preempted(state: State, event: ev.Preempted) -> None:
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
    if event.for_row != ev.FOR_ALL:
        if state.has_lazy_windows:
            release_skipped(state, np.array([event.for_row], np.intp))
        make_room(state, event)
    if state.constants.is_asynchronous and state.in_flight[event.row]:
        await_stale(state, event.row, event.request_id, drops=state.resetting)
    leave_row(state, req_state)
    state.num_preempted += 1
    req_state.preempted = state.num_preempted
    state.enqueue(req_state)
    state.preempted_in_step |= for_room


def _apply_finished(state: State, event: ev.Finished) -> None:
    req_state = state.requests.pop(event.request_id, None)
    if req_state is None:  # the request was rejected before it was queued
        state.sessions.end(event.request_id)
        return
    sessions.grow(state, req_state, event.reason)
    state.num_large -= req_state.has_large
    leave_part(state, event.request_id)
    drop_host_blocks(state, req_state)
    fetch.leave_fetch(state, req_state)
    adapters.forget_adapter_of(state, req_state)
    state.clear_suspicion(req_state)
    if req_state.row == NO_ROW:
        state.waiting.remove(req_state)
        state.tenants.dequeue(req_state)
    else:
        # The KV of a row with NaN logits may hold NaN, so its blocks must not become prefix hits.
        if state.ended[req_state.row] == BROKEN and not state.constants.keeps_broken_blocks:
            _forget_row(state, req_state.row)
        leave_row(state, req_state)
    state.tenants.leave(req_state)
    for names in (state.cancelled, state.grammar_failed, state.thrashing, state.stopped):
        if event.request_id in names:
            names.remove(event.request_id)


def _forget_row(state: State, row: int) -> None:
    blocks = state.block_table[row, : state.num_blocks[row]]
    if state.num_groups > 1:
        state.blocks.windows.forget_contents(state.blocks.content[blocks])
    state.blocks.index.forget(blocks)


def _apply_cache_reset(state: State, event: ev.CacheReset) -> None:
    sessions.end_leases(state)
    state.resetting = event.preempt_running and len(state.running) > 0
    if state.resetting and state.constants.frees_at_once:
        return  # by vLLM's rules, prefixes are forgotten when the last running request has left
    state.blocks.reset_cache()
    state.states.clear()
    state.content[state.running] = NO_CONTENT


def _apply_recovered(state: State, event: ev.Recovered) -> None:
    """Apply RECOVERED: a new process continues an ended process's log.

    Tokens and waiting requests are kept. Steps in flight, KV, encoder outputs and host blocks are lost,
    because they were in the ended process's memory.
    """
    while state.flights:
        land(state)
    if state.is_open:
        close_step(state)
    state.reset_step()
    free_rows_left(state)
    for req_state in state.requests.values():
        req_state.held_media.clear()
        drop_host_blocks(state, req_state)
        fetch.leave_fetch(state, req_state)
        fetch.ask(state, req_state)
    rows = state.running
    state.release_at[rows] = NEVER
    state.encoder.clear()
    state.part = None
    sessions.end_leases(state)
    state.blocks.reset_cache()
    state.states.clear()
    state.content[rows] = NO_CONTENT
    state.resetting = False
    goes_on = (state.ended[rows] == RUNS_ON) & (state.num_tokens[rows] < state.max_total[rows])
    if state.num_prefills:
        of_rows = state.requests_by_row[rows].tolist()
        goes_on |= np.array([req_state.request.is_prefill for req_state in of_rows], bool)
    state.ended[rows[goes_on]] = CRASHED
    for name, why in event.lost:
        state.requests[name].detail = why
        state.requests[name].waits_for_grammar = False
        state.grammar_failed.append(name)


def _apply_stalled(state: State, event: ev.Stalled) -> None:
    if event.request_id in state.thrashing:
        state.thrashing.remove(event.request_id)

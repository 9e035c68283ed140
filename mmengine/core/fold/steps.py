"""Applies events about steps: dispatches, results, failures, and drafts that arrive after a result.

A step is open from its first decision on. DISPATCHED closes the step and adds it to the steps in flight.
Without overlapping steps there is no DISPATCHED, and the step's result closes the step.
"""

import numpy as np

from mmengine.core.fold.asynchronous import deliver_stale, expect_drafts, reject_drafts, settled
from mmengine.core.fold.media import drop_part, release_media
from mmengine.core.fold.rows import (
    drop_host_blocks,
    fill_before_error,
    fill_with_result,
    free_rows_left,
    put_drafts,
    take_drafts,
    take_runs,
    weigh_drafts,
)
from mmengine.core.fold.states import pass_kept
from mmengine.core.fold.uniform_window import release_before_window
from mmengine.core.fold.windows import release_windows
from mmengine.core.state.columns import BROKEN, LEFT, LOST, STOPPED
from mmengine.core.state.flight import Flight
from mmengine.core.state.overlap import draft_level_after
from mmengine.core.state.request_state import RequestState
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev

NO_VECTOR = "the model gave NaN or infinite values for this request"


def close_step(state: State) -> Flight:
    """Close the open step, return it as a Flight, and prepare the state for the next step."""
    flight = state.open_step()
    state.encoder.dropped.clear()
    state.last_rows = flight.rows
    if state.config.num_state_slots:
        pass_kept(state, flight.rows)
    state.scheduled[flight.rows] = 0
    state.step += 1
    state.reset_step()
    return flight


def apply_dispatched(state: State) -> None:
    """Close the open step and add it to the steps in flight."""
    flight = close_step(state)
    flight.draft_level = draft_level_after(state, flight.rows)
    if state.constants.is_asynchronous:
        expect_drafts(state, flight)
    state.in_flight[flight.rows] += 1
    state.num_pending[flight.sampled] += _pending(flight)
    state.flights.append(flight)


def land(state: State) -> Flight:
    """Remove and return the oldest step in flight. If none is in flight, close and return the open step."""
    if not state.flights:
        return close_step(state)
    flight = state.flights.popleft()
    state.in_flight[flight.rows] -= 1
    state.num_pending[flight.sampled] -= _pending(flight)
    return flight


def _pending(flight: Flight) -> np.ndarray | int:
    return 1 if flight.num_drafts is None else 1 + flight.num_drafts


def apply_executed(state: State, event: ev.Executed) -> None:
    """Apply the oldest step's result, which has at least one token for each row that samples."""
    flight = land(state)
    rows, sampled = flight.rows, flight.sampled
    if state.goodput is not None:
        weigh_drafts(state, state.goodput, flight, event)
    state.history.update(event.token_ids)
    tokens = np.frombuffer(event.token_ids, np.int32)
    counts = None if event.counts is None else np.frombuffer(event.counts, np.int32)
    if state.stale:
        deliver_stale(state, flight, event)
    if event.pooled:
        _apply_pooled(state, event)
    for index, what in event.errors:
        if state.ended[sampled[index]] != LEFT:
            state.ended[sampled[index]] = BROKEN
            state.requests_by_row[sampled[index]].detail = what
    for index, kind in event.stops:
        row = sampled[index]
        if state.ended[row] == LEFT:
            continue
        count = 1 if counts is None else counts[index]
        if state.num_tokens[row] + count <= state.max_total[row]:  # else the length limit ends the request
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
        # Remove rejected drafts.
        if flight.num_drafts is not None:
            reject_drafts(state, flight, counts)
        elif (state.verifies or event.errors) and not state.flights:
            state.num_computed[sampled] = state.num_tokens[sampled] - 1
        if flight.num_drafts is None:
            take_drafts(state, rows, sampled, event)
    if state.constants.fills_with_results:
        fill_with_result(state, sampled)
        if event.errors and state.constants.keeps_broken_blocks:
            fill_before_error(state, sampled, event)
    if state.num_with_media:
        computed = state.num_computed[rows] if flight.num_computed is None else flight.num_computed
        if state.constants.is_asynchronous:
            computed = settled(state, flight, counts)
        done = state.release_at[rows] <= computed
        for row, reached in zip(rows[done].tolist(), computed[done].tolist(), strict=True):
            release_media(state, row, reached)
    if state.num_groups > 1 and not state.has_lazy_windows:
        release_windows(state, flight)
    if state.config.uniform_window:
        release_before_window(state, flight)
    if state.suspects:
        for row in sampled[state.ended[sampled] < BROKEN].tolist():
            state.clear_suspicion(state.requests_by_row[row])
        if flight.part_of in state.requests:
            state.clear_suspicion(state.requests[flight.part_of])
    if state.leaving:
        free_rows_left(state)


def _apply_pooled(state: State, event: ev.Executed) -> None:
    """Add the vectors' digests to the history. Fail the requests whose vectors are not finite."""
    for row, digest, _ in event.pooled:
        state.history.update(digest)
        if not digest and state.ended[row] != LEFT:
            state.ended[row] = BROKEN
            state.requests_by_row[row].detail = NO_VECTOR


def apply_drafted(state: State, event: ev.Drafted) -> None:
    """Write drafts that arrived after their step's result. Drafts are stored after a row's known tokens."""
    rows = np.frombuffer(event.rows, np.int32).astype(np.intp)
    put_drafts(state, rows, np.frombuffer(event.num_drafts, np.int32), np.frombuffer(event.drafts, np.int32))
    state.drafter[rows] = 0


def apply_failed(state: State, event: ev.Failed) -> None:
    """Apply the oldest step's failure. Later steps in flight depend on its result, so they fail too."""
    oldest = land(state)
    void = [oldest]
    while state.flights:
        void.append(land(state))
    drop_part(state)
    for flight in void:
        _forget(state, flight)
    for row in np.unique(np.concatenate([flight.rows for flight in void])).tolist():
        if state.ended[row] != LEFT:
            state.requests_by_row[row].detail = event.error
            state.ended[row] = LOST
    lost = [state.requests_by_row[row] for row in oldest.rows.tolist() if state.ended[row] == LOST]
    owner = state.requests.get(oldest.part_of)
    if owner is not None and owner in lost:
        owner = None
    for req_state in lost:
        _blame(state, req_state, len(oldest.rows) + (owner is not None))
    if owner is not None:
        _blame_for_part(state, owner, len(oldest.rows) + 1, event.error)
    free_rows_left(state)


def _blame_for_part(state: State, owner: RequestState, num_requests: int, error: str) -> None:
    """Count a failed step against `owner`, whose media item the step encoded in part. The request keeps its
    row, because the step computed none of the request's tokens.
    """
    _blame(state, owner, num_requests)
    if owner.failures > state.config.max_retries:
        owner.detail = error
        state.grammar_failed.append(owner.request.request_id)


def _blame(state: State, req_state: RequestState, num_rows: int) -> None:
    """Count a failed step with `num_rows` requests against a request. With `isolates_failures`, the request
    becomes a suspect. A later step with the request has at most half the failed step's rows.
    """
    if not state.constants.isolates_failures:
        req_state.failures += 1
        return
    req_state.failures = req_state.failures + 1 if num_rows == 1 else max(req_state.failures, 1)
    req_state.isolation_rows = max(1, num_rows // 2)
    state.suspects[req_state.request.request_id] = None


def _forget(state: State, flight: Flight) -> None:
    """Undo a failed step's effects on blocks, recurrent states, swaps and encoder outputs."""
    for blocks in flight.filled:
        state.blocks.forget(blocks)
    for kept_states in flight.kept:
        state.states.forget(kept_states[:, 2])
    for req_state in flight.swapped:
        drop_host_blocks(state, req_state)
    kept = state.encoder
    for key, _, _ in flight.encoded:
        if key in kept.entries:
            kept.invalidate(key)
    kept.dropped += [key for key in flight.gone if key not in kept.entries and key not in kept.dropped]

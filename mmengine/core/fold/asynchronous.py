"""Applies events by the rules of vLLM's AsyncScheduler, which schedules a step before the previous step's
results arrive.

Placeholders stand for the running step's tokens and drafts. A preempted request still gets the tokens that
steps in flight sample.
"""

import numpy as np

from mmengine.core.state.columns import LEFT
from mmengine.core.state.flight import Flight
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


def expect_drafts(state: State, flight: Flight) -> None:
    """Record a dispatched step's drafts, and schedule draft placeholders for each row that samples."""
    if not state.config.num_draft_tokens:
        return
    flight.num_drafts = state.scheduled_drafts[flight.sampled].copy()
    state.scheduled_drafts[flight.rows] = 0
    state.verifies = False
    state.num_drafts[flight.sampled] = state.config.num_draft_tokens
    state.has_drafts = True


def reject_drafts(state: State, flight: Flight, counts: np.ndarray | None) -> None:
    """Subtract rejected drafts from the rows' computed tokens. `counts`: each row's number of new tokens;
    None: one token each.
    """
    assert flight.num_drafts is not None
    rejected = flight.num_drafts - (0 if counts is None else counts - 1)
    lives = state.ended[flight.sampled] != LEFT
    rows, rejected = flight.sampled[lives], rejected[lives]
    state.num_computed[rows] -= rejected


def settled(state: State, flight: Flight, counts: np.ndarray | None) -> np.ndarray:
    """Return each row's number of computed tokens, int32, without drafts that may still be rejected."""
    tokens = np.zeros(state.config.num_rows, np.int32)
    tokens[flight.sampled] = 1 if counts is None else counts
    return state.num_computed[flight.rows] - state.num_pending[flight.rows] - tokens[flight.rows]


def await_stale(state: State, row: int, name: str, *, drops: bool) -> None:
    """Record that a preempted request loses `row` while steps in flight compute the row. `drops`: whether the
    tokens from these steps are dropped.
    """
    req_state = state.requests[name]
    was_dropping = any(dropping for other, dropping in state.stale.values() if other is req_state)
    state.stale[row] = (req_state, drops or was_dropping)


def deliver_stale(state: State, flight: Flight, event: ev.Executed) -> None:
    """Append the tokens from the step `flight` to requests that were preempted after the dispatch. Call this
    after `land` (core/fold/steps.py).
    """
    tokens = np.frombuffer(event.token_ids, np.int32)
    counts = np.ones(len(flight.sampled), np.int32)
    if event.counts is not None:
        counts = np.frombuffer(event.counts, np.int32)
    ends = np.cumsum(counts)
    stops = dict(event.stops)
    for index, row in enumerate(flight.sampled.tolist()):
        if row not in state.stale:
            continue
        req_state, drops = state.stale[row]
        name = req_state.request.request_id
        if drops or state.requests.get(name) is not req_state or name in state.stopped:
            continue
        most = req_state.num_prompt + req_state.request.sampling.max_tokens
        most = min(most, state.config.max_model_len)
        got = tokens[ends[index] - counts[index] : ends[index]]
        req_state.tokens = np.concatenate((req_state.tokens, got))[:most]
        if index in stops and len(req_state.tokens) <= most:
            req_state.detail = stops[index]
        if index in stops or len(req_state.tokens) >= most:
            state.stopped.append(name)
    for row in [row for row in state.stale if not state.in_flight[row]]:
        del state.stale[row]

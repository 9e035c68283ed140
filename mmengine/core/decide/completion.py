"""Decides which requests end or are preempted after a step, a cancellation, a failed step or a crash."""

import numpy as np

from mmengine.core.decide.leases import is_computed
from mmengine.core.executor import CUT, REPETITION, REPETITION_CLOSED
from mmengine.core.state.columns import BROKEN, CRASHED, LOST, RUNS_ON, STOPPED
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.errors import ErrorCode
from mmengine.events import vocabulary as ev

# The finish reason for each kind of stop. Kinds that are not listed have the reason "stop".
_REASONS = {CUT: "length", REPETITION: "repetition", REPETITION_CLOSED: "repetition"}


def complete(view: View) -> list[ev.Finished | ev.Preempted]:
    """Return the events for requests that end or are preempted.

    FINISHED: the request stopped, was pooled, reached its length limit, failed or was cancelled. PREEMPTED:
    the request is retried after a failed step, a crash or a cache reset. Rows that ended come first, in
    admission order.
    """
    running = view.running
    # In most steps no request is complete. Comparing whole columns is the fastest way to see this. Free rows
    # never look complete.
    over = (view.num_tokens >= view.max_total) | (view.ended != RUNS_ON)
    if view.num_prefills:
        over = _without_unread(view, over)
    ending = running[over[running]] if np.count_nonzero(over) else running[:0]
    events = [_end_of(view, view.requests_by_row[row]) for row in ending.tolist()]
    ended = {event.request_id for event in events}
    for name in view.stopped:
        detail = view.requests[name].detail
        events.append(ev.Finished(name, _REASONS.get(detail, "stop") if detail else "length", detail))
    ended.update(view.stopped)
    for name in view.cancelled:
        if name not in ended:
            events.append(_aborted(view.requests[name]))
    for name in view.grammar_failed:
        if name not in ended and not view.requests[name].cancelled:
            events.append(_failed(view.requests[name]))
    if view.resetting:
        names = [
            view.requests_by_row[row].request.request_id for row in running[~over[running]][::-1].tolist()
        ]
        gone = {event.request_id for event in events}
        events += [
            ev.Preempted(name, view.requests[name].row, "recompute", "the prefix cache was reset")
            for name in names
            if name not in gone
        ]
    return events


def _without_unread(view: View, over: np.ndarray) -> np.ndarray:
    """Set `over` to False for prefill-only requests whose prompts are not computed yet, and return `over`.
    `over`: bool [max_rows], whether the row's request is complete.
    """
    for row in np.flatnonzero(over & np.asarray(view.ended == RUNS_ON)).tolist():
        over[row] = is_computed(view, view.requests_by_row[row])
    return over


def _failed(req_state: RequestView) -> ev.Finished:
    """Return FINISHED with the reason "error"."""
    code = ErrorCode.INVALID_GRAMMAR if req_state.waits_for_grammar else ErrorCode.REQUEST_FAILED
    return ev.Finished(req_state.request.request_id, "error", req_state.detail, code)


def _aborted(req_state: RequestView) -> ev.Finished:
    """Return FINISHED for a request that was cancelled or whose deadline has passed."""
    reason = req_state.cancelled
    code = ErrorCode.DEADLINE_EXCEEDED if reason == ev.DEADLINE else ErrorCode.CANCELLED
    return ev.Finished(req_state.request.request_id, "abort", reason, code)


def _end_of(view: View, req_state: RequestView) -> ev.Finished | ev.Preempted:
    name, row = req_state.request.request_id, req_state.row
    ended = view.ended[row]
    if ended == STOPPED:
        return ev.Finished(name, _REASONS.get(req_state.detail, "stop"), req_state.detail)
    if ended == BROKEN:
        return _failed(req_state)
    if ended in (LOST, CRASHED) and req_state.cancelled:
        return _aborted(req_state)
    if ended in (LOST, CRASHED) and name in view.grammar_failed:
        return _failed(req_state)
    if ended == CRASHED:
        return ev.Preempted(name, row, "recompute", "crash")
    if ended == LOST and req_state.failures > view.config.max_retries:
        return _failed(req_state)
    if ended == LOST:
        return ev.Preempted(name, row, "recompute", "the step failed")
    return ev.Finished(name, "length" if req_state.request.pooling is None else "pooled")

"""Describes a log record's effect in a sentence, with the reason for a decision."""

import numpy as np

from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.replay.queries.reasons import Reasons
from mmengine.replay.queries.request_events import described_event
from mmengine.replay.timeline import taken_tokens

MAX_NAMED = 6  # Maximum number of requests or keys in a sentence.


def event_text(state: State, event: ev.Event) -> str:
    """Return a sentence about an event. `state`: the state before the event."""
    name = getattr(event, "request_id", "")
    if name and (name in state.requests or not isinstance(event, (ev.Admitted, ev.Preempted, ev.Encoded))):
        return f"{name}: {described_event(state, event)}{_cause(state, event)}"
    match event:
        case ev.Started():
            return f"mmengine {event.engine_version}" + (f" records {event.host}" if event.host else "")
        case ev.Scheduled():
            return _scheduled(state, event)
        case ev.Executed():
            return _executed(state, event)
        case ev.Dispatched():
            return f"step {state.step} is decided, and runs"
        case ev.Failed(error=error):
            return f"the step failed: {error}"
        case ev.Checkpoint(digest=digest):
            return f"the state's digest is {digest.hex()}"
        case ev.Evicted(keys=keys):
            return f"{_keys(keys)} left the encoder cache"
        case ev.Drafted(rows=rows):
            return f"drafts for {_names(state, _ints(rows))}"
        case ev.StatesKept(rows=rows):
            return f"keeps the recurrent states of {_names(state, _ints(rows))}"
        case ev.CacheReset():
            return "all cached prefixes are dropped"
        case ev.Recovered():
            return "the process ended, and another process continues the log"
        case ev.SessionOpened(session_id=session_id):
            return f"session {session_id} opened"
        case ev.SessionClosed(session_id=session_id, reason=reason):
            return f"session {session_id} closed: {reason}"
        case ev.Leased(session_id=session_id, num_kept=kept, blocks=blocks):
            return f"session {session_id} leases {kept + len(blocks) // 4} blocks"
        case ev.LeaseTaken(session_id=session_id, num_kept=kept, reason=reason):
            return f"session {session_id} keeps {kept} leased blocks: {reason}"
        case ev.AdapterLoaded(adapter=adapter):
            return f"adapter {adapter.name or adapter.digest.hex()[:12]} is known"
        case ev.AdapterUnloaded(name=adapter_name):
            return f"adapter {adapter_name} is unknown to new requests"
        case ev.Noted(kind=kind, detail=detail):
            return f"{kind}: {detail}" if detail else kind
        case ev.Stalled(kind=kind, detail=detail):
            return f"{kind}: {detail}"
    return type(event).__name__


def _cause(state: State, event: ev.Event) -> str:
    """Return a clause with the reason for a decision, computed from the state."""
    if isinstance(event, ev.Preempted) and event.reason == "no free blocks":
        try:
            needed, free = Reasons(View(state)).blocks_short()
        except Exception:  # The state was written by a broken build.
            return ""
        return f" (running requests need {needed} more blocks, {free} free)" if needed > free else ""
    return ""


def _scheduled(state: State, event: ev.Scheduled) -> str:
    rows = state.last_rows if event.rows is None else _ints(event.rows)
    tokens = len(rows) if event.num_tokens is None else int(_ints(event.num_tokens).sum())
    text = f"{tokens} tokens of {_names(state, rows)}"
    if event.num_drafts is not None:
        text += f", {int(_ints(event.num_drafts).sum())} of them drafts"
    if event.new_blocks:
        text += f", {len(event.new_blocks) // 4} new blocks"
    if event.encode:
        text += f", encodes {len(event.encode)} items"
    return text + (f", evicts {_keys(event.evict)}" if event.evict else "")


def _executed(state: State, event: ev.Executed) -> str:
    taken = list(taken_tokens(state, event))
    count = sum(len(tokens) for _, tokens in taken)
    text = f"{count} tokens for {_names(state, np.array([row for row, _ in taken], np.intp))}"
    if event.stops:
        text += f", {len(event.stops)} texts end"
    if event.errors:
        text += f", {len(event.errors)} rows failed"
    return text + (f", {event.device_ns / 1e6:.2f} ms" if event.device_ns else "")


def _names(state: State, rows: np.ndarray) -> str:
    held = [state.requests_by_row[row] for row in rows.tolist()[:MAX_NAMED]]
    names = [each.request.request_id for each in held if each is not None]
    more = len(rows) - len(names)
    return (", ".join(names) + (f" and {more} more" if more else "")) or "no request"


def _keys(keys: tuple[bytes, ...]) -> str:
    shown = ", ".join(key.hex()[:16] for key in keys[:MAX_NAMED])
    more = len(keys) - MAX_NAMED
    return shown + (f" and {more} more" if more > 0 else "")


def _ints(column: bytes) -> np.ndarray:
    return np.frombuffer(column, np.int32)

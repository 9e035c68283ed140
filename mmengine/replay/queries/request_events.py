"""Lists the events of a log that concern a request, and their effects on the request."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.envelopes import api_name
from mmengine.replay.queries.wall_clock import WallClock
from mmengine.replay.timeline import fold, taken_tokens
from mmengine.request import GrammarRequest


class RequestEvent(msgspec.Struct, frozen=True):
    """An event that concerns a request.

    `since_ns`: time since the request's arrival. `changed`: the changed values by name. `text`: the same
    changes as an English sentence. `wall_ns`: the Unix time, or 0 if unknown.
    """

    sequence: int
    step: int
    since_ns: int
    event: str
    text: str
    changed: dict[str, Any]
    wall_ns: int = 0


def request_events(
    log: CheckedLog, request_id: str, clock: WallClock | None = None
) -> Iterator[RequestEvent]:
    """Yield each event that concerns a request with this id. `clock`: gives `wall_ns`.

    If the request's arrival was deleted with the log's beginning, times count from the log's first record.
    """
    queued_ns = -1
    with log.naming():
        for state, record in fold(log):
            if record is log.first and request_id in state.requests:
                queued_ns = record.mono_ns
            if isinstance(record.event, (ev.Queued, ev.Appended)) and record.event.request_id == request_id:
                queued_ns = record.mono_ns
            if queued_ns < 0:
                continue
            found = _change(state, record, request_id)
            if found is not None:
                text, changed = found
                kind = type(record.event).__name__
                since = record.mono_ns - queued_ns
                wall_ns = 0 if clock is None else clock.at(record)
                yield RequestEvent(record.sequence, record.step, since, kind, text, changed, wall_ns)


def _change(state: State, record: Record, name: str) -> tuple[str, dict[str, object]] | None:
    event = record.event
    if getattr(event, "request_id", None) == name:
        return _own(state, event)
    req_state = state.requests.get(name)
    if req_state is not None and isinstance(event, ev.Recovered):
        return "the process ended, and another process continues the log", {}
    if req_state is None or req_state.row < 0:
        return None
    match event:
        case ev.Leased(session_id=session_id) if state.sessions.all[session_id].live == name:
            count = event.num_kept + len(event.blocks) // 4
            return f"session {session_id} leases {count} of its blocks", {"leased": count}
        case ev.Scheduled():
            return _scheduled(state, event, req_state.row)
        case ev.Executed():
            return _executed(state, event, req_state.row)
        case ev.Failed(error=error) if state.in_flight[req_state.row] or state.scheduled[req_state.row]:
            return f"the step failed: {error}", {"error": error}
        case ev.CacheReset():
            return "all cached prefixes are dropped", {}
    return None


def described_event(state: State, event: ev.Event) -> str:
    """Return a text about an event that names a request. `state`: the state before the event."""
    return _own(state, event)[0]


def _own(state: State, event: ev.Event) -> tuple[str, dict[str, object]]:
    """Describe the effects of an event that names the request."""
    match event:
        case ev.Queued():
            return _queued(state, event)
        case ev.Admitted():
            return _admitted(state, event)
        case ev.Encoded(index=index, until=until):
            work = state.requests[event.request_id].media_work[index]
            text = f"encodes a part of item {index}, up to {until} of its work of {work}"
            return text, {"encode": [index], "until": until, "work": work}
        case ev.Preempted():
            tokens, blocks = int(state.num_tokens[event.row]), int(state.num_blocks[event.row])
            where = "KV copied to the host" if event.mode == "swap" else "KV dropped"
            changed: dict[str, object] = {"mode": event.mode, "reason": event.reason, "blocks": blocks}
            text = f"preempted ({event.reason}) at {tokens} tokens: {blocks} blocks freed, {where}"
            if event.for_row >= 0 and state.requests_by_row[event.for_row] is not None:
                changed["for"] = state.requests_by_row[event.for_row].request.request_id
                text += f", in favour of {changed['for']}"
            return text, changed
        case ev.Finished():
            return f"ended: {event.reason} {event.detail}".rstrip(), {
                "reason": event.reason,
                "detail": event.detail,
            }
        case ev.Cancelled():
            return f"cancelled: {event.reason}", {"reason": event.reason}
        case ev.Appended():
            text = f"continues the first {event.num_kept} tokens of session {event.session_id}"
            gone = len(state.sessions.all[event.session_id].tokens) - event.num_kept
            text += f"; its other {gone} tokens are dropped" if gone > 0 else ""
            return text, {"session": event.session_id, "kept": event.num_kept, "forgotten": max(0, gone)}
        case ev.Offered():
            items = f", and sent {len(event.items)} encoder outputs" if event.items else ""
            text = f"a store has {event.num_blocks} blocks of its prefix{items}"
            return text, {"blocks": event.num_blocks, "items": [index for index, _ in event.items]}
        case ev.Fetched():
            count, cached = len(event.blocks) // 4, len(event.cached) // 4
            return f"fetches {count} blocks after {cached} cached blocks", {"blocks": count, "cached": cached}
        case ev.Arrived():
            return f"{len(event.digests) // 8} blocks arrived", {"blocks": len(event.digests) // 8}
        case ev.Lost():
            return f"the store's blocks do not arrive: {event.reason}", {"reason": event.reason}
        case ev.GrammarReady():
            return "its grammar is compiled", {}
        case ev.GrammarFailed():
            return f"its grammar cannot be compiled: {event.detail}", {"detail": event.detail}
        case ev.Delivered():
            return "the answer reached its consumer", {}
        case ev.Stalled():
            return f"reported: {event.kind}; {event.detail}", {"kind": event.kind, "detail": event.detail}
    return type(event).__name__, {}


def _queued(state: State, event: ev.Queued) -> tuple[str, dict[str, object]]:
    changed: dict[str, object] = {
        "prompt_tokens": len(event.prompt) // 4,
        "media": [{"modality": item.modality, "embeddings": item.num_embeds} for item in event.media],
        "max_tokens": event.sampling.max_tokens,
        "behind": len(state.waiting),
    }
    parts = [f"{changed['prompt_tokens']} prompt tokens"]
    if event.media:
        embeddings = sum(item.num_embeds for item in event.media)
        parts.append(f"{embeddings} of them embeddings of images or videos ({len(event.media)})")
    if event.outputs:
        changed["outputs"] = len(event.outputs) // 4
        parts.append(f"{changed['outputs']} tokens of its answer included")
    if event.envelope:
        changed["api"] = api_name(event.envelope)
        parts.append(f"through {changed['api']}")
    if event.adapter is not None:
        changed["adapter"] = event.adapter.name or event.adapter.digest.hex()[:12]
        parts.append(f"for the adapter {changed['adapter']}")
    if event.priority:
        changed["priority"] = event.priority
        parts.append(f"priority {event.priority}")
    if event.group:
        changed["group"] = event.group
        parts.append(f"the prompt of {event.group}")
    grammar = state.grammar_slots.whole(event).grammar
    if grammar is not None:
        changed["grammar"] = _grammar(grammar)
        parts.append(_grammar_text(grammar))
    parts.append(f"{len(state.waiting)} waiting")
    return "arrived: " + ", ".join(parts), changed


def _grammar(grammar: GrammarRequest) -> dict[str, object]:
    return {
        "kind": grammar.kind,
        "characters": len(grammar.source),
        "after": list(grammar.after),
        "on_truncation": grammar.on_truncation,
    }


def _grammar_text(grammar: GrammarRequest) -> str:
    parts = [f"{grammar.kind or 'unknown kind'}, {len(grammar.source):,} characters"]
    if grammar.after:
        parts.append(f"after {len(grammar.after)} tokens")
    if grammar.closes:
        parts.append("completed within its budget")
    return f"with a grammar ({', '.join(parts)})"


def _admitted(state: State, event: ev.Admitted) -> tuple[str, dict[str, object]]:
    req_state = state.requests[event.request_id]
    cached = hit_tokens(state, event)
    first = cached if event.num_computed < 0 else event.num_computed
    encode = [index for _, _, index in event.encode]
    changed: dict[str, object] = {
        "row": event.row,
        "tokens": [first, first + event.num_tokens],
        "cached_tokens": cached,
        "new_blocks": len(event.new_blocks) // 4,
        "encode": encode,
        "swap_in": event.swap_in,
    }
    text = f"got row {event.row}: computes {_span(first, event.num_tokens, len(req_state.tokens))}"
    text += f", {cached} of {len(req_state.tokens)} tokens cached, {changed['new_blocks']} new blocks"
    if event.swap_in:
        text += f", {req_state.num_swapped} tokens swapped in from the host"
    if event.copy is not None:
        text += ", last prompt block copied"
    return text + _encoding(encode), changed


def _scheduled(state: State, event: ev.Scheduled, row: int) -> tuple[str, dict[str, object]] | None:
    rows = state.last_rows if event.rows is None else np.frombuffer(event.rows, np.int32)
    places = np.flatnonzero(rows == row)
    if not len(places):
        return None
    place = int(places[0])
    count = 1 if event.num_tokens is None else int(np.frombuffer(event.num_tokens, np.int32)[place])
    drafts = 0 if event.num_drafts is None else int(np.frombuffer(event.num_drafts, np.int32)[place])
    first = int(state.num_computed[row])
    encode = [index for _, owner, index in event.encode if owner == row]
    changed: dict[str, object] = {"tokens": [first, first + count], "drafts": drafts, "encode": encode}
    text = f"computes {_span(first, count, int(state.num_tokens[row] + state.num_pending[row]))}"
    if drafts:
        text += f", {drafts} of them drafts"
    return text + _encoding(encode), changed


def _executed(state: State, event: ev.Executed, row: int) -> tuple[str, dict[str, object]] | None:
    sampled = state.sampled_rows().tolist()
    if row not in sampled:
        return None
    index = sampled.index(row)
    stops, errors = dict(event.stops), dict(event.errors)
    tokens = next((list(map(int, tokens)) for each, tokens in taken_tokens(state, event) if each == row), [])
    changed: dict[str, object] = {"token_ids": tokens, "num_tokens": int(state.num_tokens[row]) + len(tokens)}
    text = f"token {tokens[0]}" if len(tokens) == 1 else f"tokens {', '.join(map(str, tokens))}"
    if index in stops:
        changed["stop"] = stops[index]
        text += f"; the text ends ({stops[index]})"
    if index in errors:
        changed["error"] = errors[index]
        text = f"the row failed: {errors[index]}"
    return text, changed


def _span(first: int, count: int, req_state: int) -> str:
    if count == 1:
        return f"token {first} of {req_state}"
    return f"tokens {first} to {first + count - 1} of {req_state}"


def _encoding(indices: list[int]) -> str:
    return f", encodes item {', '.join(map(str, indices))}" if indices else ""

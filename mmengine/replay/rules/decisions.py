"""The rules that a logged decision must satisfy, checked on the state just before the decision.

A broken rule is a finding about the build that wrote the log (findings.py). The rules are cheap, so every
tool that reads a log checks them. In contrast, `mmengine log verify --invariants` checks the whole state
after each record. The rules also protect the state's arrays from a hostile log: row, block and slot numbers
must be in range.
"""

import numpy as np

from mmengine.core.state.flight import work_done
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.replay.findings import FOLD, BrokenRule
from mmengine.replay.rules.admitted import check_admitted
from mmengine.replay.rules.common import (
    MalformedColumn,
    Rules,
    check_new_blocks,
    int32_column,
    out_of_range,
)
from mmengine.replay.rules.scheduled import check_scheduled


def broken_rules(state: State, event: ev.Event) -> Rules:
    """Yield the rules that the decision `event` breaks. Yields nothing for an observation.

    `state`: the state before the event. If the decision cannot be applied to the state, later rules may be
    left unchecked. Raises MalformedColumn. Raises other exceptions if the event refers to an unknown request,
    row or slot.
    """
    match event:
        case ev.Scheduled():
            yield from check_scheduled(state, event)
        case ev.Admitted():
            yield from check_admitted(state, event)
        case ev.Preempted():
            yield from _preempted(state, event)
        case ev.Finished(request_id=name, reason=reason):
            if name not in state.requests and reason != "rejected":
                yield BrokenRule("queue", f"request {name!r:.80} ends, but it is not live", 0, 1)
        case ev.Encoded():
            yield from _encoded(state, event)
        case ev.StatesKept():
            yield from _states_kept(state, event)
        case ev.Fetched():
            yield from _fetched(state, event)
        case ev.Leased() | ev.LeaseTaken():
            yield from _leased(state, event)
        case ev.Dispatched() if len(state.flights) >= state.config.max_in_flight:
            count, limit = len(state.flights) + 1, state.config.max_in_flight
            text = f"step {state.step} would be in flight as one of {count} steps; the limit is {limit} "
            yield BrokenRule("flights", text + "(max_in_flight)", count, limit, can_fold=False)


def first_broken_rule(state: State, event: ev.Event) -> BrokenRule | None:
    """Return the first rule that an event breaks, or None. If a check raises an exception, the broken rule is
    FOLD.
    """
    try:
        return next(broken_rules(state, event), None)
    except Exception as error:
        text = f"the state cannot take the decision: {type(error).__name__}: {error!s:.200}"
        return BrokenRule(FOLD, text, 0, 0, can_fold=False)


def _preempted(state: State, event: ev.Preempted) -> Rules:
    config = state.config
    holder = state.requests_by_row[event.row] if 0 <= event.row < config.num_rows else None
    if holder is None or holder.request.request_id != event.request_id:
        text = f"request {event.request_id!r:.80} loses row {event.row}, which it does not have"
        yield BrokenRule("rows", text, event.row, config.num_rows - 1, can_fold=False)
        return
    if event.for_row != ev.FOR_ALL and event.for_row not in state.running.tolist():
        text = f"row {event.row} is preempted for row {event.for_row}, which does not run"
        yield BrokenRule("rows", text, event.for_row, config.num_rows - 1, can_fold=False)
    blocks = int32_column("host_blocks", event.host_blocks)
    yield from out_of_range("host_blocks", "host_blocks", blocks, 0, config.swap_blocks)
    if len(blocks) > state.num_blocks[event.row]:
        held = int(state.num_blocks[event.row])
        text = f"row {event.row} is swapped to {len(blocks)} host blocks, but holds {held} blocks"
        yield BrokenRule("host_blocks", text, len(blocks), held, can_fold=False)
    elif busy := len(blocks) - len(np.intersect1d(blocks, state.free_host_blocks)):
        text = f"row {event.row} is swapped to {busy} host blocks that are not free"
        yield BrokenRule("host_blocks", text, busy, 0)


def _encoded(state: State, event: ev.Encoded) -> Rules:
    req_state = state.requests[event.request_id]
    count = len(req_state.media_work)
    if not 0 <= event.index < count:
        text = f"step {state.step} encodes a part of item {event.index} of a request with {count} large items"
        yield BrokenRule("encoder", text, event.index, count, can_fold=False)
        return
    done, work = work_done(state.part, req_state.media_keys[event.index]), req_state.media_work[event.index]
    if not done < event.until <= work:
        text = f"a part ends after {event.until} of an item's work; {done + 1} to {work} are left"
        yield BrokenRule("encoder", text, event.until, work, can_fold=False)


def _states_kept(state: State, event: ev.StatesKept) -> Rules:
    rows, counts, slots = (
        int32_column(name, getattr(event, name)) for name in ("rows", "num_tokens", "slots")
    )
    if not len(rows) == len(counts) == len(slots):
        raise MalformedColumn("STATES_KEPT has columns of different lengths")
    yield from out_of_range("rows", "rows", rows, 0, state.config.num_rows)
    yield from out_of_range("state_slots", "slots", slots, 0, state.config.num_state_slots)
    yield from out_of_range(
        "state_slots", "num_tokens", counts, state.block_size, state.token_ids.shape[1] + 1
    )


def _fetched(state: State, event: ev.Fetched) -> Rules:
    cached, new = int32_column("cached", event.cached), int32_column("blocks", event.blocks)
    yield from out_of_range("blocks", "cached", cached, 1, state.config.num_blocks)
    yield from out_of_range("blocks", "blocks", new, 1, state.config.num_blocks)
    size, known = state.block_size * (len(cached) + len(new)), len(state.requests[event.request_id].tokens)
    if not len(new) or size >= known:
        text = f"{len(new)} blocks are fetched after {len(cached)} prefix hits, for a request with {known} "
        text += "tokens; at least one token must stay to be computed"
        yield BrokenRule("blocks", text, size, known - 1, can_fold=False)
        return
    yield from check_new_blocks(state, new)


def _leased(state: State, event: ev.Leased | ev.LeaseTaken) -> Rules:
    if isinstance(event, ev.Leased):
        blocks = int32_column("blocks", event.blocks)
        yield from out_of_range("blocks", "blocks", blocks, 1, state.config.num_blocks)
    most = len(state.sessions.all[event.session_id].leased)
    if not 0 <= event.num_kept <= most:
        text = f"a session keeps {event.num_kept} blocks of a lease of {most}"
        yield BrokenRule("sessions", text, event.num_kept, most, can_fold=False)

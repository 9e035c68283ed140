"""Compares each logged decision about a request with the decision that this build's rules make on the same
state.

The query `why` adds each difference to its sentence about the decision.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from mmengine.core.decide.completion import complete
from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.decide.leases import next_lease
from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.replay.queries.reasons import OTHER, Reasons

# A note is a pair: a sentence with a leading space (or ""), and the facts in this sentence.
Note = tuple[str, Mapping[str, object]]
AGREED: Note = ("", {})
_VICTIMS = {
    "fcfs": "the last admitted request",
    "prefill_first": "the last admitted request",
    "priority": "the least important request, the latest among equals",
}


class Expected(NamedTuple):
    """The rules' decision. `is_known`: whether this build can decide. False if the log has other rules, or if
    the state is inconsistent.
    """

    is_known: bool
    event: ev.Event | None = None


UNKNOWN = Expected(False)


class Rules:
    """This build's rules, applied to the state in `view`. `applies`: whether the log was written under these
    rules.
    """

    def __init__(self, view: View, applies: bool):
        self._view, self._applies = view, applies
        self._scheduler = scheduler_of(view.config)

    def decision(self) -> Expected:
        """Return the scheduler's next decision on the current state. The event is None if the step is
        complete.
        """
        if not self._applies:
            return UNKNOWN
        try:
            return Expected(True, self._scheduler.schedule(self._view))
        # A broken build's log may lead to an inconsistent state, for which the rules raise errors.
        except Exception:
            return UNKNOWN

    def end_of(self, request_id: str) -> Expected:
        """Return the event with which the rules end or preempt the request between two steps: FINISHED or
        PREEMPTED. The event is None if the request continues.
        """
        if not self._applies:
            return UNKNOWN
        try:
            events = complete(self._view)
        except Exception:  # See `decision`.
            return UNKNOWN
        return Expected(True, next((event for event in events if event.request_id == request_id), None))

    def lease(self, logged: ev.LeaseTaken) -> Note:
        """Return a note on how a logged LEASE_TAKEN differs from the rules' decision. Must be called before
        the event is applied.
        """
        found = self.decision()
        if found.is_known and not isinstance(found.event, ev.LeaseTaken):
            try:
                found = Expected(True, next_lease(self._view))
            except Exception:  # See `decision`.
                return AGREED
        if not found.is_known or found.event == logged:
            return AGREED
        if not isinstance(found.event, ev.LeaseTaken):
            return " This build's rules would have taken no blocks from a session.", {"rules": "no lease"}
        text = f"session {found.event.session_id}"
        if found.event.session_id == logged.session_id:
            text = f"all but {found.event.num_kept} blocks"
        return f" This build's rules would have taken {text}.", {"rules": found.event.session_id}

    def preemption(self, logged: ev.Preempted, found: Expected) -> Note:
        """Return a note that compares a logged preemption's victim with the rules' decision `found`. Must be
        called before the event is applied.
        """
        view, policy = self._view, self._view.config.policy
        expected = found.event
        # vLLM decides row by row, but a vLLM log records all preemptions before the scheduled rows. At a
        # logged preemption, the rules' decision may therefore be SCHEDULED.
        is_early = bool(view.config.compat) and isinstance(expected, ev.Scheduled)
        if not found.is_known or is_early:
            return f" The victim: {self._place(logged.row)}.", {}
        if not isinstance(expected, ev.Preempted):
            facts = {"rules": _kind(expected)}
            return f" This build's rules would have preempted no request here: {_instead(expected)}.", facts
        if expected.request_id != logged.request_id:
            other = f"{expected.request_id} ({self._place(expected.row)})"
            text = f" The policy {policy} would have preempted {other}; the log preempts {logged.request_id}"
            return f"{text} ({self._place(logged.row)}).", {"rules": expected.request_id}
        text = f" The policy {policy} preempts {_VICTIMS.get(policy, 'this request')}."
        if expected.mode != logged.mode:
            how = "swapped its KV out" if expected.mode == "swap" else "dropped its KV"
            return f"{text} This build's rules would have {how}.", {"rules": expected.mode}
        if expected.for_row != logged.for_row:
            held = view.requests_by_row[expected.for_row] if expected.for_row >= 0 else None
            whom = "the next rows" if held is None else held.request.request_id
            return f"{text} This build's rules would have preempted it in favour of {whom}.", {"rules": whom}
        return text, {}

    def preemption_outside(self, logged: ev.Preempted) -> Note:
        """Return a note on how a logged preemption after a failed step, a crash or a cache reset differs from
        the rules' decision.
        """
        found = self.end_of(logged.request_id)
        if not found.is_known or isinstance(found.event, ev.Preempted):
            return AGREED
        facts = {"rules": _kind(found.event)}
        if isinstance(found.event, ev.Finished):
            return f" This build's rules would have ended the request: {found.event.reason}.", facts
        return " This build's rules would not have preempted the request.", facts

    def admission(self, logged: ev.Admitted, found: Expected) -> Note:
        """Return a note on how a logged admission differs from the rules' decision `found`. Must be called
        before the event is applied.
        """
        expected = found.event
        if not found.is_known or expected == logged:
            return AGREED
        if not isinstance(expected, ev.Admitted):
            reason = self._reason(logged.request_id)
            why = reason or _instead(expected)
            return f" This build's rules would not have admitted the request here: {why}.", {"rules": why}
        if expected.request_id != logged.request_id:
            other = expected.request_id
            ranks = [self._view.policy.rank(self._view.requests[name]) for name in (other, logged.request_id)]
            why = "ahead in the queue" if ranks[0] < ranks[1] else "its tenant's turn comes first"
            if reason := self._reason(logged.request_id):
                why += f"; for this request, {reason}"
            return f" This build's rules would have admitted {other} first ({why}).", {"rules": other}
        text = "; ".join(self._fields(logged, expected))
        return f" This build's rules would have decided otherwise: {text}.", {"rules": text}

    def _fields(self, logged: ev.Admitted, expected: ev.Admitted) -> Iterator[str]:
        """Yield a clause for each difference between two admissions."""
        if logged.cached_blocks != expected.cached_blocks:
            here, there = (hit_tokens(self._view, event) for event in (expected, logged))
            which = f"; the log takes {there}" if here != there else ", in other blocks"
            yield f"{here} tokens are in the prefix cache{which}"
        if logged.num_tokens != expected.num_tokens:
            yield f"{expected.num_tokens} tokens in this step; the log computes {logged.num_tokens}"
        if logged.encode != expected.encode:
            yield f"items to encode: {_items(expected.encode)}; in the log: {_items(logged.encode)}"
        if logged.evict != expected.evict:
            yield f"{len(expected.evict)} evictions from the encoder cache, not those of the log"
        if logged.row != expected.row:
            yield f"row {expected.row}; the log takes row {logged.row}"
        counts = [len(event.new_blocks) // 4 for event in (expected, logged)]
        if logged.cached_blocks == expected.cached_blocks and logged.new_blocks != expected.new_blocks:
            which = f"{counts[0]} new blocks; the log takes {counts[1]}"
            yield which if counts[0] != counts[1] else "other free blocks"
        rest = ("num_computed", "copy", "swap_in", "state_slot", "state_from", "num_shared", "adapters_out")
        for name in rest:
            own, other = (getattr(event, name, None) for event in (expected, logged))
            if own != other:
                yield f"{name} {own!r}; the log has {other!r}"

    def rows(self, row: int, logged: ev.Scheduled, found: Expected) -> Note:
        """Return a note on how a running row's scheduled tokens differ from the rules' decision `found`. Must
        be called before the event is applied.
        """
        if not found.is_known or found.event == logged:
            return AGREED
        there = self._tokens(row, logged)
        if not there:
            return AGREED
        if not isinstance(found.event, ev.Scheduled):
            text = (
                f"This build's rules would not have scheduled the running requests: {_instead(found.event)}."
            )
            return text, {"rules": _kind(found.event)}
        here = self._tokens(row, found.event)
        if here == there:
            return AGREED
        text = (
            f"The log computes {there} tokens of the request; this build's rules would have computed {here}."
        )
        return text, {"rules": here, "tokens": there}

    def _tokens(self, row: int, event: ev.Scheduled) -> int:
        rows = self._view.last_rows if event.rows is None else np.frombuffer(event.rows, np.int32)
        places = np.flatnonzero(rows == row)
        if not len(places):
            return 0
        return 1 if event.num_tokens is None else int(np.frombuffer(event.num_tokens, np.int32)[places[0]])

    def end(self, logged: ev.Finished) -> Note:
        """Return a note on how a request's logged end differs from the rules' decision. Must be called before
        the event is applied.
        """
        found = self.end_of(logged.request_id)
        expected = found.event
        if not found.is_known or expected == logged:
            return AGREED
        if not isinstance(expected, ev.Finished):
            return " This build's rules would not have ended the request here.", {"rules": _kind(expected)}
        how = f"{expected.reason} {expected.detail}".rstrip()
        return f" This build's rules would have ended the request with {how}.", {"rules": how}

    def _reason(self, request_id: str) -> str:
        """Return why a waiting request cannot start, or "" if the request can start."""
        try:
            reasons = Reasons(self._view).at_end()
        except Exception:  # See `decision`.
            return ""
        found = next((reason for reason in reasons if reason.request_id == request_id), None)
        return found.sentence() if found is not None and found.kind != OTHER else ""

    def _place(self, row: int) -> str:
        """Return a clause with the row's position in the policy's preemption order."""
        view, running = self._view, self._view.running.tolist()
        count = len(running)
        if row not in running:
            return "a request that does not run"
        if view.config.policy == "priority":
            ranks = {each: view.policy.rank(view.requests_by_row[each]) for each in running}
            after = sum(rank > ranks[row] for rank in ranks.values())
            which = f"{after} of {count} running requests are less important"
            which = which if after else f"the least important of {count} running requests"
            return f"priority {view.requests_by_row[row].request.priority}, {which}"
        later = count - 1 - running.index(row)
        last = f"the last admitted of {count} running requests"
        return last if not later else f"admitted before {later} of {count} running requests"


def _kind(event: ev.Event | None) -> str:
    return "nothing" if event is None else type(event).__name__


def _instead(event: ev.Event | None) -> str:
    """Return a clause with the decision that the rules make instead."""
    match event:
        case ev.Scheduled():
            return "the blocks suffice, and the running requests are scheduled"
        case ev.Admitted(request_id=name):
            return f"{name} is admitted next"
        case ev.Preempted(request_id=name):
            return f"{name} is preempted first"
        case ev.LeaseTaken(session_id=name):
            return f"blocks leased to session {name} are taken first"
        case ev.Fetched(request_id=name):
            return f"{name} fetches blocks from a store first"
        case ev.Encoded(request_id=name):
            return f"a part of an item of {name} is encoded"
        case None:
            return "the step is complete"
    return f"{type(event).__name__} comes first"


def _items(encode: tuple[tuple[bytes, int, int], ...]) -> str:
    return ", ".join(str(index) for _, _, index in encode) or "none"

"""The outcome of one scheduling call: what the model runner is told to compute, whatever the order of the
decisions that led to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev

CALL_EVENTS = (ev.Preempted, ev.Evicted, ev.Scheduled, ev.Admitted)


@dataclass(slots=True)
class Outcome:
    """The outcome of one call. Lists are in the order of the decisions; requests are named by id.

    `rows`: (request, tokens), running requests before admitted ones. `drafts`: how many of a running
    request's tokens are drafts. `encoded`: (request, index of the item). `blocks`: the blocks that the
    running requests get, one request after the other. `tables`: the block table of each admitted request.
    `computed`: the tokens that an admitted request finds in the prefix cache. `evicted`: keys of encoder
    outputs, sorted, because vLLM does not tell the order of an output that is evicted and encoded again in
    one call.
    """

    preempted: list[str] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)
    encoded: list[tuple[str, int]] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


class Difference(NamedTuple):
    """The first field in which two outcomes differ, with both values."""

    field: str
    logged: object
    derived: object


# The fields in the order in which a difference is reported: a cause before its effects.
_FIELDS = ("preempted", "admitted", "rows", "computed", "drafts", "encoded", "tables", "blocks", "evicted")


def first_difference(logged: Outcome, derived: Outcome, *, is_fcfs: bool) -> Difference | None:
    """Return the first field that differs, or None. Of a long value only the differing part is kept.

    `is_fcfs`: whether the order of preemptions is known, as it follows from the waiting queue under fcfs.
    """
    for name in _FIELDS:
        theirs, ours = getattr(logged, name), getattr(derived, name)
        if name == "preempted" and not is_fcfs:
            theirs, ours = sorted(theirs), sorted(ours)
        if theirs != ours:
            return Difference(name, *_trimmed(theirs, ours))
    return None


def _trimmed(theirs: object, ours: object) -> tuple[object, object]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        return {name: theirs.get(name) for name in names}, {name: ours.get(name) for name in names}
    if isinstance(theirs, list) and isinstance(ours, list):
        pairs = zip(theirs, ours, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(theirs), len(ours)))
        return theirs[same:], ours[same:]
    return theirs, ours


class RecordedRows:
    """Names the requests in the rows of a recorded log, and reads the outcomes of its calls."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[int, str] = {}
        self._last: list[int] = []  # rows of the call before; SCHEDULED with `rows` None refers to them

    def outcome(self, events: Iterable[ev.Event]) -> Outcome:
        """Return the outcome of the call with these events, and remember its rows."""
        found, rows = Outcome(), list[int]()
        for event in events:
            match event:
                case ev.Preempted(request_id=name, row=row):
                    found.preempted.append(name)
                    self._names.pop(row, None)
                case ev.Evicted(keys=keys):
                    found.evicted += keys
                case ev.Scheduled():
                    rows = self._scheduled(event, found)
                case ev.Admitted(row=row):
                    self._names[row] = event.request_id
                    rows.append(row)
                    self._admitted(event, found)
        self._last = rows
        found.evicted.sort()
        return found

    def names_of(self, rows: bytes) -> list[str]:
        """Return the requests in these rows, int32. A row without a request has a text that says so."""
        return [self._name(row) for row in _ints(rows)]

    def _scheduled(self, event: ev.Scheduled, found: Outcome) -> list[int]:
        rows = list(self._last) if event.rows is None else _ints(event.rows)
        tokens = [1] * len(rows) if event.num_tokens is None else _ints(event.num_tokens)
        drafts = [] if event.num_drafts is None else _ints(event.num_drafts)
        if len(tokens) != len(rows) or len(drafts) not in (0, len(rows)):
            raise ValueError(
                f"the columns of {len(rows)} rows have {len(tokens)} tokens and {len(drafts)} drafts"
            )
        names = [self._name(row) for row in rows]
        found.rows += zip(names, tokens, strict=True)
        found.drafts |= {name: count for name, count in zip(names, drafts, strict=False) if count}
        found.blocks += _ints(event.new_blocks)
        found.evicted += event.evict
        found.encoded += [(self._name(row), index) for _, row, index in event.encode]
        return rows

    def _admitted(self, event: ev.Admitted, found: Outcome) -> None:
        name = event.request_id
        cached = _ints(event.cached_blocks)
        found.admitted.append(name)
        found.rows.append((name, event.num_tokens))
        found.computed[name] = event.num_computed
        if event.num_computed == ev.AS_CACHED:
            found.computed[name] = len(cached) * self._block_size
        found.tables[name] = cached + _ints(event.new_blocks)
        found.evicted += event.evict
        found.encoded += [(name, index) for _, _, index in event.encode]

    def _name(self, row: int) -> str:
        return self._names.get(row, f"row {row}, which no request has")


class DerivedOutcome:
    """Collects the outcome of a call from the decisions that `decide` makes on `state`. Create it before the
    call's first decision."""

    def __init__(self, state: State):
        self._state = state
        self._held = state.num_blocks.copy()
        self._preempted: list[str] = []

    def note(self, event: ev.StepDecision) -> None:
        """Note a decision, before or after it is applied."""
        if isinstance(event, ev.Preempted):
            self._preempted.append(event.request_id)

    def outcome(self) -> Outcome:
        """Return the outcome, when all decisions are applied and the step is still open."""
        state, found = self._state, Outcome(self._preempted)
        for row in state.step_rows.tolist():
            req_state = state.requests_by_row[row]
            name, blocks = req_state.request.request_id, state.block_table[row, : state.num_blocks[row]]
            found.rows.append((name, int(state.scheduled[row])))
            is_admitted = req_state.admitted_step == state.step
            if state.scheduled_drafts[row] and not is_admitted:
                found.drafts[name] = int(state.scheduled_drafts[row])
            if is_admitted:
                found.admitted.append(name)
                found.computed[name] = int(state.num_computed[row] - state.scheduled[row])
                found.tables[name] = blocks.tolist()
            else:
                found.blocks += blocks[self._held[row] :].tolist()
        names = {name for name, _ in found.rows}
        found.encoded = [
            (request.request_id, index)
            for _, request, index in state.step_encoded
            if request.request_id in names
        ]
        found.evicted = sorted(state.step_evicted)
        return found


def _ints(column: bytes | None) -> list[int]:
    return np.frombuffer(column or b"", np.int32).tolist()

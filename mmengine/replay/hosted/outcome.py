"""A scheduling call's outcome: the rows, blocks and encoder work for the model runner. Calls with equal
outcomes may have made their decisions in different orders.
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
    """A scheduling call's outcome. Lists other than `evicted` are in the order of the call's decisions. A
    request is given as its id.

    `rows`: pairs (request, tokens), running requests before admitted requests. `drafts`: how many tokens of a
    running request are drafts. `encoded`: pairs (request, index of the media item). `blocks`: the blocks that
    running requests get, one request after the other. `tables`: the block table of each admitted request.
    `computed`: the number of tokens from prefix cache hits for each admitted request. `evicted`: the evicted
    encoder outputs' keys. These are sorted, because vLLM does not always report their order.
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


# Fields in the order in which differences are reported. A difference can cause further differences only in
# later fields.
_FIELDS = ("preempted", "admitted", "rows", "computed", "drafts", "encoded", "tables", "blocks", "evicted")


def first_difference(logged: Outcome, derived: Outcome, *, is_fcfs: bool) -> Difference | None:
    """Return the first field that differs, or None. The result's lists begin at the first different item, and
    its dicts omit equal items.

    `is_fcfs`: whether the scheduling policy is fcfs. The order of preempted requests is compared only under
    fcfs, because the host does not report their order under other policies.
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
    """Tracks the request in each row of a recorded log, and reads the outcomes of the scheduling calls."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[int, str] = {}
        # The previous call's rows. SCHEDULED with `rows` None repeats these rows.
        self._last: list[int] = []

    def outcome(self, events: Iterable[ev.Event]) -> Outcome:
        """Return the outcome of the call with these events, and store the call's rows for the next call."""
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
        """Return the requests in these rows, or a text for a row without a request. `rows`: int32 bytes."""
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
    """Collects the outcome of a scheduling call from its decisions on `state`. Must be created before the
    first decision.
    """

    def __init__(self, state: State):
        self._state = state
        self._held = state.num_blocks.copy()
        self._preempted: list[str] = []

    def note(self, event: ev.StepDecision) -> None:
        """Record a decision. May be called before or after the decision is applied."""
        if isinstance(event, ev.Preempted):
            self._preempted.append(event.request_id)

    def outcome(self) -> Outcome:
        """Return the outcome. Must be called after all decisions are applied, while the step is still
        open.
        """
        state, found = self._state, Outcome(self._preempted)
        for row in state.step_rows.tolist():
            req_state = state.requests_by_row[row]
            name = req_state.request.request_id
            found.rows.append((name, int(state.scheduled[row])))
            is_admitted = req_state.admitted_step == state.step
            if state.scheduled_drafts[row] and not is_admitted:
                found.drafts[name] = int(state.scheduled_drafts[row])
            if is_admitted:
                found.admitted.append(name)
                found.computed[name] = int(state.num_computed[row] - state.scheduled[row])
                found.tables[name] = self._table(row, found.computed[name] // state.block_size)
            else:
                found.blocks += self._blocks_from(row, int(self._held[row]))
        names = {name for name, _ in found.rows}
        found.encoded = [
            (request.request_id, index)
            for _, request, index in state.step_encoded
            if request.request_id in names
        ]
        found.evicted = sorted(state.step_evicted)
        return found

    def _table(self, row: int, num_hits: int) -> list[int]:
        """Return an admitted row's blocks in ADMITTED's order: each group's prefix hits, then the other
        blocks.
        """
        state, hits = self._state, self._state.block_table[row, :num_hits].tolist()
        for blocks in state.windows.by_group(row, num_hits):
            hits += blocks.tolist()
        return hits + self._blocks_from(row, num_hits)

    def _blocks_from(self, row: int, first: int) -> list[int]:
        """Return a row's blocks from table index `first` on, sorted by index and then by block group."""
        state, numbers = self._state, slice(first, int(self._state.num_blocks[row]))
        tables = [state.block_table[row, numbers]]
        tables += [table[row, numbers] for table in state.windows.tables]
        found: list[int] = np.stack(tables, axis=1).ravel().tolist()
        return found


def _ints(column: bytes | None) -> list[int]:
    return np.frombuffer(column or b"", np.int32).tolist()

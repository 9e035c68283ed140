"""Finds the first difference between two logs. The comparison replaces row numbers in events with request
ids.

Block numbers, times, checkpoints and deliveries are not compared. The result says whether the first
difference is an input, or a decision that was derived from equal inputs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from mmengine.core.state.state import State
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.timeline import fold, taken_tokens

Match = Literal["id", "arrival"]
_PASSED_OVER = (ev.Started, ev.Checkpoint, ev.Delivered)
_TIMES = {"device_ns", "draft_ns", "host_ns", "logprobs", "prompt_logprobs", "pooled"}


class Side(msgspec.Struct, frozen=True):
    """One log's record and state at the difference. `event`: the kind of the event, or "" if this log has
    ended. `value`: the value of the different field.
    """

    sequence: int
    step: int
    event: str
    value: Any  # JSON
    running: int
    waiting: int
    free_blocks: int


class LogDifference(msgspec.Struct, frozen=True):
    """The first difference between two logs.

    `kind` is "inputs", "decisions", "end" (one log is a prefix of the other), or "" for equal logs.
    `settings`: for each different setting, the values in the first and the second log. `events`: the number
    of equal events before the difference. `field`, `request`: the different field, and the request to which
    the field belongs, or "".
    """

    kind: str
    settings: dict[str, tuple[object, object]]
    events: int
    last_common_step: int
    field: str = ""
    request: str = ""
    sides: tuple[Side, Side] | None = None


def diff(
    first: Path,
    second: Path,
    match: Match = "id",
    *,
    shapes: bool = False,
    findings: tuple[Findings, Findings] | None = None,
) -> LogDifference:
    """Return the first difference between two logs. A log counts as ended at the first decision that its
    state does not allow.

    `match`: match requests by id or by arrival number. `shapes`: compare only the sizes of user content, such
    as the number of tokens. `findings`: an object for each log, to collect the decisions that break a rule.
    Raises `verify`'s errors, and LogError for logs that begin at different records.
    """
    found = findings or (Findings(), Findings())
    logs = CheckedLog(first, findings=found[0]), CheckedLog(second, findings=found[1])
    if logs[0].begins_after != logs[1].begins_after:
        gone = first if logs[0].begins_after > logs[1].begins_after else second
        raise LogError(
            f"the beginning of the log in {gone} was deleted, so the two logs begin at different records"
        )
    settings = _settings(*(log.started for log in logs))
    walks = tuple(_facts(log, match, shapes) for log in logs)
    count, step = 0, -1
    while True:
        one, two = (next(walk, None) for walk in walks)
        if one is None and two is None:
            return LogDifference("", settings, count, step)
        if one is None or two is None or one[2:] != two[2:]:
            return _difference(logs, one, two, settings, count, step)
        count, step = count + 1, one[1].step


_Fact = tuple[State, Record, str, dict[str, object]]


def _facts(log: CheckedLog, match: Match, shapes: bool) -> Iterator[_Fact]:
    """Yield each compared event as (state before the event, record, kind, fields). The fields contain request
    names instead of row numbers.
    """
    for state, record in fold(log):
        if not isinstance(record.event, _PASSED_OVER):
            fields: dict[str, object] = {}
            with log.naming(record):
                fields = _Fields(state, match).of(record)
                if shapes:
                    fields = {name: _shape(name, value) for name, value in fields.items()}
            if log.is_over:
                return
            yield state, record, type(record.event).__name__, fields


_CONTENT = {
    *("prompt", "tokens", "drafts", "media", "evict", "keys", "used", "stops", "errors", "lost", "cuts"),
    *("sampling", "grammar", "cache_salt", "error", "detail", "fingerprints", "engine_version", "mode"),
    *("outputs", "envelope", "adapter", "adapters_out"),
}


def _shape(name: str, value: Any) -> object:
    """Return the size of a value with user content. Return any other value unchanged."""
    if name not in _CONTENT or isinstance(value, int):
        return value
    if name == "grammar" and value is not None:
        return value["on_truncation"]
    if isinstance(value, dict):
        return {key: _shape(name, item) for key, item in value.items()}
    return len(value) if isinstance(value, (list, tuple)) else value is not None


class _Fields:
    def __init__(self, state: State, match: Match):
        self._state, self._by_arrival = state, match == "arrival"

    def of(self, record: Record) -> dict[str, object]:
        event = record.event
        match event:
            case ev.Scheduled():
                fields = self._scheduled(event)
            case ev.Admitted():
                fields = self._admitted(event)
            case ev.Encoded():
                fields = msgspec.structs.asdict(event)
                fields["evict"] = [key[:8].hex() for key in event.evict]
            case ev.Executed():
                fields = self._executed(event)
            case ev.Drafted():
                rows, drafts = np.frombuffer(event.rows, np.int32), np.frombuffer(event.drafts, np.int32)
                fields = {
                    "drafts": self._drafts(rows.tolist(), drafts, _ints(event.num_drafts, len(rows), 0))
                }
            case ev.Preempted(for_row=row):
                fields = {"mode": event.mode, "reason": event.reason, "for": self._holder(row)}
            case ev.Queued():
                fields = msgspec.structs.asdict(event)
                fields["prompt"] = np.frombuffer(event.prompt, np.int32).tolist()
                fields["outputs"] = np.frombuffer(event.outputs, np.int32).tolist()
                fields["group"] = self._name(event.group)
                grammar = self._state.grammar_slots.whole(event).grammar
                fields["grammar"] = grammar and msgspec.structs.asdict(grammar)
                # The grammar slot is not a property of the request.
                del fields["grammar_slot"]
            case _:
                fields = msgspec.structs.asdict(event)
        if hasattr(event, "request_id"):
            fields["request_id"] = self._name(event.request_id)
        return {"step": record.step, **fields}

    def _name(self, name: str) -> str:
        if not self._by_arrival or not name:
            return name
        req_state = self._state.requests.get(name)
        return f"#{req_state.arrival if req_state is not None else self._state.num_arrived}"

    def _holder(self, row: int) -> str:
        req_state = self._state.requests_by_row[row] if row >= 0 else None
        return self._name(req_state.request.request_id) if req_state is not None else ""

    def _encode(self, event: ev.Scheduled | ev.Admitted, own: str) -> list[tuple[str, int]]:
        rows = ((own or self._holder(row), index) for _, row, index in event.encode)
        return [(name, index) for name, index in rows]

    def _scheduled(self, event: ev.Scheduled) -> dict[str, object]:
        rows = self._state.last_rows if event.rows is None else np.frombuffer(event.rows, np.int32)
        names = [self._holder(row) for row in rows.tolist()]
        return {
            "tokens": dict(zip(names, _ints(event.num_tokens, len(names), 1), strict=True)),
            "drafts": dict(zip(names, _ints(event.num_drafts, len(names), 0), strict=True)),
            "new_blocks": len(event.new_blocks) // 4,
            "encode": self._encode(event, ""),
            "evict": [key[:8].hex() for key in event.evict],
        }

    def _admitted(self, event: ev.Admitted) -> dict[str, object]:
        name = self._name(event.request_id)
        return {
            "tokens": event.num_tokens,
            "cached_blocks": len(event.cached_blocks) // 4,
            "new_blocks": len(event.new_blocks) // 4,
            "num_computed": event.num_computed,
            "encode": self._encode(event, name),
            "evict": [key[:8].hex() for key in event.evict],
            "copies": event.copy is not None,
            "swap_in": event.swap_in,
        }

    def _executed(self, event: ev.Executed) -> dict[str, object]:
        sampled = self._state.sampled_rows().tolist()
        drafts, counts = np.frombuffer(event.drafts, np.int32), _ints(event.num_drafts, len(sampled), 0)
        return {
            "tokens": {
                self._holder(row): tokens.tolist() for row, tokens in taken_tokens(self._state, event)
            },
            "stops": {self._holder(sampled[index]): kind for index, kind in event.stops},
            "errors": {self._holder(sampled[index]): what for index, what in event.errors},
            "drafts": self._drafts(sampled, drafts, counts),
        }

    def _drafts(self, rows: list[int], drafts: np.ndarray, counts: list[int]) -> dict[str, list[int]]:
        ends = np.cumsum(counts, dtype=np.int64).tolist()
        return {
            self._holder(row): drafts[end - count : end].tolist()
            for row, count, end in zip(rows, counts, ends, strict=True)
            if count
        }


def _ints(column: bytes | None, count: int, each: int) -> list[int]:
    return [each] * count if column is None else np.frombuffer(column, np.int32).tolist()


def _settings(one: ev.Started, two: ev.Started) -> dict[str, tuple[object, object]]:
    sides = []
    for started in (one, two):
        prints = {f"fingerprint of {name}": value for name, value in started.fingerprints.items()}
        versions = {"engine version": started.engine_version, "decision rules": started.decision_version}
        sides.append({**started.config, **versions, **prints})
    names = [name for name in {**sides[0], **sides[1]} if sides[0].get(name) != sides[1].get(name)]
    return {name: (sides[0].get(name), sides[1].get(name)) for name in names}


def _difference(
    logs: tuple[CheckedLog, CheckedLog],
    one: _Fact | None,
    two: _Fact | None,
    settings: dict[str, tuple[object, object]],
    count: int,
    step: int,
) -> LogDifference:
    if one is None or two is None:
        sides = _side(one, None if one is None else one[3]), _side(two, None if two is None else two[3])
        return LogDifference("end", settings, count, step, "event", "", sides)
    kind = "inputs" if _is_input(one[1].event, two[1].event) else "decisions"
    if one[2] != two[2]:
        request = str(one[3].get("request_id") or two[3].get("request_id") or "")
        sides = _side(one, one[3]), _side(two, two[3])
        return LogDifference(kind, settings, count, step, "event", request, sides)
    name = next(name for name in {**one[3], **two[3]} if one[3].get(name) != two[3].get(name))
    left, right, request = one[3].get(name), two[3].get(name), str(one[3].get("request_id", ""))
    if isinstance(left, dict) and isinstance(right, dict) and list(left) == list(right):
        request = next(each for each in left if left[each] != right[each])
        left, right = left[request], right[request]
    sides = _side(one, left), _side(two, right)
    return LogDifference(kind, settings, count, step, name, request, sides)


def _is_input(one: ev.Event, two: ev.Event) -> bool:
    """Return whether the inputs differ rather than the decisions. A step's result in one log and a decision
    in the other count as different decisions, because the second log has more decisions before its result.
    """
    results = [isinstance(event, (ev.Executed, ev.Failed)) for event in (one, two)]
    seen = [isinstance(event, ev.OBSERVATIONS) for event in (one, two)]
    return all(seen) or any(seen) and not any(results)


def _side(fact: _Fact | None, value: object) -> Side:
    if fact is None:
        return Side(-1, -1, "", None, 0, 0, 0)
    state, record, kind, _ = fact
    pools = len(state.running), len(state.waiting), state.blocks.num_free
    return Side(record.sequence, record.step, kind, value, *pools)

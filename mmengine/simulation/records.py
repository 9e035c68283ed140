"""Records a simulation's decisions, one record per step, and finds the first difference between two runs.

A record has hard fields (decisions and tokens) and soft fields (queues and free resources). `free` and
`enc_free` are counted after the step's decisions. `free_after` and `enc_free_after` are counted after the
step's tokens were applied. Empty hard fields are left out, except `sched`.
"""

import json
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.core.executor import StepPlan, StepResult
from mmengine.core.state.state import State
from mmengine.errors import InvalidRequest
from mmengine.simulation.bounded_files import decode, existing, lines

Record = dict[str, Any]
HARD_FIELDS = ("sched", "spec", "enc", "admit", "preempt", "enc_evict", "out", "finish")
_DECIDED = ("free", "enc_free", "running", "waiting", "n_running", "n_waiting")
_UPDATED = ("free_after", "enc_free_after")
SOFT_FIELDS = (*_DECIDED, *_UPDATED)
_ORDER = ("step", *HARD_FIELDS[:-2], *_DECIDED, *HARD_FIELDS[-2:], *_UPDATED)


@dataclass(slots=True)
class _Open:
    """The incomplete record of a step. `aborted`: requests that are aborted while the step runs."""

    record: Record
    aborted: set[str]
    runs: bool = False  # whether the step has been dispatched but not collected
    keep: bool = False  # whether the record will be written
    evicted: tuple[bytes, ...] = ()  # encoder keys
    encoded: Set[bytes] = frozenset()  # encoder keys


class Recorder:
    """Builds records from the executor's plans and results and from the sink's events, and passes each record
    to `write`.

    `media_names`: encoder key -> name of the item. `queues`: whether to record the ids of running and waiting
    requests instead of the counts.
    """

    def __init__(self, write: Callable[[Record], None], media_names: dict[bytes, str], *, queues: bool):
        self._write = write
        self._media_names = media_names
        self._queues = queues
        self._open: deque[_Open] = deque()
        self._by_plan: dict[int, _Open] = {}
        # The record to which the next finished requests are added. The initial record is discarded.
        self._ending = _Open({}, set())
        self._names: dict[int, str] = {}  # row -> request id

    def begin(self, step: int, aborted: set[str]) -> None:
        """Begin a step's record. `aborted`: requests that will be aborted while the step runs."""
        self._flush()
        self._ending = _Open({"step": step, "sched": []}, aborted)
        self._open.append(self._ending)

    def dispatched(self, plan: StepPlan) -> None:
        here = self._open[-1]
        here.runs = here.keep = True
        self._by_plan[plan.step] = here
        record = here.record
        for admission in plan.admitted:
            self._names[admission.row] = admission.request.request_id
        names = [self._names[row] for row in plan.rows.tolist()]
        record["sched"] = [list(pair) for pair in zip(names, plan.num_scheduled.tolist(), strict=True)]
        if plan.num_drafts is not None:
            drafted = np.flatnonzero(plan.num_drafts).tolist()
            record["spec"] = {names[place]: int(plan.num_drafts[place]) for place in drafted}
        if plan.admitted:
            computed = dict(zip(names, plan.num_computed.tolist(), strict=True))
            admitted = [admission.request.request_id for admission in plan.admitted]
            record["admit"] = {name: computed[name] for name in admitted}
        encoded: dict[str, list[int]] = {}
        for item in plan.encode:
            if item.request.request_id in names:  # false if the request was preempted in the same step
                encoded.setdefault(item.request.request_id, []).append(item.index)
        record["enc"] = encoded
        here.evicted = plan.evict
        here.encoded = {item.key for item in plan.encode}

    def collected(self, plan: StepPlan, result: StepResult, clock_ns: int) -> None:
        here = self._ending = self._by_plan.pop(plan.step)
        here.runs = False
        names = [self._names[row] for row in plan.rows[plan.sample].tolist()]
        counts = [1] * len(names) if result.counts is None else result.counts.tolist()
        tokens, at, out = result.token_ids.tolist(), 0, {}
        for name, count in zip(names, counts, strict=True):
            if name not in here.aborted:
                out[name] = tokens[at : at + count]
            at += count
        here.record["out"] = out

    def preempted(self, request_id: str) -> None:
        self._ending.record.setdefault("preempt", []).append(request_id)

    def finished(self, request_id: str, reason: str) -> None:
        """Record a request's end. The ends of aborted requests are not recorded."""
        if reason != "abort" and request_id not in self._ending.aborted:
            self._ending.record.setdefault("finish", {})[request_id] = reason
            self._ending.keep = True

    def updated(self, state: State) -> None:
        """Record the free resources after a step's tokens were applied. With mmengine's own rules (`compat`
        is ""), skip a step with aborted requests, because these requests still hold resources.
        """
        if self._ending.keep and (state.config.compat or not self._ending.aborted):
            self._ending.record["free_after"] = state.blocks.num_free
            self._ending.record["enc_free_after"] = _encoder_free(state)

    def decided(self, state: State) -> None:
        """Record the state after the step's decisions, even if nothing could run."""
        here = self._open[-1]
        here.keep |= bool(state.requests) or "preempt" in here.record
        if not here.keep:
            return
        evicted = _gone(here) if state.config.compat else here.evicted
        here.record["enc_evict"] = [self._media_names.get(key, key.hex()) for key in evicted]
        here.record |= {"free": state.blocks.num_free, "enc_free": _encoder_free(state)}
        if self._queues:
            running = [state.requests_by_row[row].request.request_id for row in state.running.tolist()]
            waiting = [known.request.request_id for known in state.waiting]
            here.record |= {"running": running, "waiting": waiting}
        else:
            here.record |= {"n_running": len(state.running), "n_waiting": len(state.waiting)}

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        while self._open and not self._open[0].runs:
            done = self._open.popleft()
            if done.keep:
                self._write(_tidy(done.record))


def _gone(step: _Open) -> list[bytes]:
    """Return the evicted keys that the step did not encode again. As in vLLM, a key that was evicted several
    times is listed once, at the last eviction.
    """
    rest = step.evicted
    return [key for place, key in enumerate(rest, 1) if key not in step.encoded and key not in rest[place:]]


def _encoder_free(state: State) -> list[int]:
    """Return how many further embeddings the encoder cache can store: without evictions, and after the
    eviction of all unreferenced embeddings.
    """
    free = state.encoder.capacity - state.encoder.used
    return [free, free + state.encoder.idle_size]


def _tidy(record: Record) -> Record:
    keep_empty = ("step", "sched", *SOFT_FIELDS)
    return {name: record[name] for name in _ORDER if name in record and (record[name] or name in keep_empty)}


def record_line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def read_records(path: Path) -> list[Record]:
    """Read the records in a scenario's `expect` (.json), or in a decisions file (.jsonl or .jsonl.gz)."""
    if path.suffix == ".json":
        records = decode(existing(path).read_bytes(), dict[str, Any], str(path)).get("expect")
        if not isinstance(records, list):
            raise InvalidRequest(f"{path} has no expected records")
        return records
    parsed = (decode(line, dict[str, Any], f"{path}, line {n}") for n, line in lines(existing(path), None))
    return [record for record in parsed if "step" in record]


def first_difference(
    expected: list[Record], actual: list[Record], *, soft: bool = False, open_ends: Set[str] = frozenset()
) -> str:
    """Return the first difference between two lists of records as a text with step, field and both values.
    Return "" for equal lists.

    Steps without requests are skipped. `soft`: also compare the soft fields that both records have.
    `open_ends`: ids of requests whose `finish` is not compared.
    """
    if open_ends:
        expected, actual = (
            [_without_ends(each, open_ends) for each in records] for records in (expected, actual)
        )
    expected, actual = ([each for each in records if _counts(each)] for records in (expected, actual))
    for ours, theirs in zip(actual, expected, strict=False):
        for name in ("step", *HARD_FIELDS, *(SOFT_FIELDS if soft else ())):
            if name in SOFT_FIELDS and not (name in ours and name in theirs):
                continue
            if (ours.get(name) or None) != (theirs.get(name) or None):
                return f"step {theirs['step']}: {name}: expected {theirs.get(name)!r}, got {ours.get(name)!r}"
    if len(expected) != len(actual):
        return f"expected {len(expected)} steps, got {len(actual)}"
    return ""


def _without_ends(record: Record, names: Set[str]) -> Record:
    ends = record.get("finish", {})
    return {**record, "finish": {name: ends[name] for name in ends if name not in names}} if ends else record


def _counts(record: Record) -> bool:
    names = ("sched", "finish", "preempt", "running", "waiting", "n_running", "n_waiting")
    return any(record.get(name) for name in names)

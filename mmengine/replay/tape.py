"""Verifies a log by running the engine's loop again. The log replaces the executor, the source of
observations, and the sink for events.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from mmengine.core.executor import StepPlan, StepResult
from mmengine.core.state.digest import where_apart
from mmengine.core.state.state import State
from mmengine.core.step_result import pooled_vectors, prompt_logprobs
from mmengine.errors import ExecutorFailed
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.findings import BrokenRule, Finding, place_of
from mmengine.replay.rules.decisions import first_broken_rule
from mmengine.replay.verify_report import Divergence, VerifyReport, readable
from mmengine.replay.watcher import Watcher
from mmengine.request import SamplingParams

_OBSERVATIONS = frozenset(ev.OBSERVATIONS)
RECENT = 8  # Number of observations that are shown with a divergence.
INVARIANT = "invariant "  # Prefix of a divergence's `field` for a broken invariant.
CRASH = "crash"  # A divergence's `field` if this build raises an exception after the last record.


# These exceptions end the loop. They do not derive from `Exception`, because the loop turns an executor's
# exceptions into FAILED.


class Diverged(BaseException):
    def __init__(self, divergence: Divergence):
        super().__init__(divergence.field)
        self.divergence = divergence


class Crashed(BaseException):
    """Raised where the process that wrote the log ended and another process continued. The next record is
    RECOVERED.
    """


class Blamed(BaseException):
    """Raised like Crashed, if the next process blamed a step for the crash. The next records are FAILED and
    RECOVERED.
    """

    def __init__(self, cause: str, recovered: ev.Recovered):
        super().__init__(cause)
        self.cause, self.recovered = cause, recovered


class LogEnded(BaseException):
    """Raised if the log ends in the middle of a step, because a crash interrupted the step."""


class LogTape:
    """Acts as executor, source and sink in a replay of a log. Raises Diverged at the first event that differs
    from the log.
    """

    num_bytes, stalled = 0, ""

    def __init__(
        self, records: Iterator[Record], report: VerifyReport, progress: Callable[[Record], None] | None
    ):
        self._records = records
        self._report = report
        self._progress = progress
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self.next: Record | None = next(records, None)
        self.last: Record | None = None  # The previous record.
        self.watcher: Watcher | None = None  # Checks the invariants between every two records.
        self.agreed: Record | None = None  # The last checkpoint whose digest matched.

    # Executor

    @property
    def needs_plan(self) -> bool:
        """Whether the loop builds plans. A replay needs plans only to check them."""
        return self.watcher is not None and self.watcher.checks_plans

    def dispatch(self, plan: StepPlan) -> None:
        """Check a step's plan."""
        if self.watcher is not None:
            self.watcher.plan(plan)

    def collect(self) -> StepResult:
        event = self._expect().event
        if isinstance(event, ev.Recovered):
            raise Crashed
        if isinstance(event, ev.Failed):
            raise ExecutorFailed(event.error)
        if not isinstance(event, ev.Executed):
            raise Diverged(self.divergence("event", type(event).__name__, "Executed"))
        tokens = np.frombuffer(event.token_ids, np.int32)
        logprobs = tuple((index, list(entries)) for index, entries in event.logprobs)
        return StepResult(
            tokens,
            event.stops,
            event.errors,
            logprobs,
            event.device_ns,
            _int32(event.counts),
            _int32(event.drafts),
            _int32(event.num_drafts),
            _int32(event.drafters),
            event.draft_ns,
            event.host_ns,
            tuple(prompt_logprobs(event)),
            pooled_vectors(event),
        )

    def discard(self) -> None:
        """Do nothing, because the log has no results for the steps after a failed step."""

    # Source

    def drain(self) -> Iterator[ev.Event]:
        """Yield the next observations in the log. The loop appends each observation before it takes the
        next.
        """
        return self._observations(_observation_behind)

    def leavers(self) -> Iterator[ev.Event]:
        leaves = (ev.Cancelled, ev.GrammarFailed)
        return self._observations(lambda event: event if isinstance(event, leaves) else None)

    def _observations(self, choose: Callable[[ev.Event], ev.Event | None]) -> Iterator[ev.Event]:
        while self.next is not None and (observation := choose(self.next.event)) is not None:
            before = self.next.sequence
            yield observation
            if self.next is not None and self.next.sequence == before:
                raise Diverged(self.divergence("event", type(observation).__name__, "nothing"))

    def __len__(self) -> int:
        return int(self.next is not None)

    # Sink

    @property
    def next_sequence(self) -> int:
        return 0 if self.last is None else self.last.sequence + 1

    def _raise_if_blamed(self, logged: ev.Failed) -> None:
        following = next(self._records, None)
        if following is not None:
            self._records = chain((following,), self._records)
            if isinstance(following.event, ev.Recovered):
                raise Blamed(logged.error, following.event)

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        if self.watcher is not None:
            self.watcher.check_state()
            self.check_invariants()
        record = self._expect()
        logged = record.event
        if isinstance(logged, ev.Recovered) and not isinstance(event, ev.Recovered):
            raise Crashed
        if type(event) is not type(logged):
            if isinstance(logged, ev.Failed):
                self._raise_if_blamed(logged)
            raise Diverged(self.divergence("event", type(logged).__name__, type(event).__name__, event))
        if event != logged:
            name = next(n for n in event.__struct_fields__ if getattr(event, n) != getattr(logged, n))
            raise Diverged(self.divergence(name, getattr(logged, name), getattr(event, name), event))
        if step != record.step:
            raise Diverged(self.divergence("step", record.step, step))
        self._check_rules(logged)
        following = next(self._records, None)
        if (
            self.last is not None
            and record.mono_ns < self.last.mono_ns
            and not _begins_process(record, following)
        ):
            raise Diverged(self.divergence("mono_ns", record.mono_ns, f"{self.last.mono_ns} or later"))
        self._count(record)
        if type(logged) in _OBSERVATIONS:
            self._recent.append(record)
        self.last, self.next = record, following

    def _check_rules(self, event: ev.Event) -> None:
        """Raise Diverged if the event breaks a rule, given the state before the event."""
        if self.watcher is None:
            return
        self.watcher.follow(event)
        self.watcher.check_decision(event)
        if (found := self.watcher.broken) is not None:
            raise Diverged(self.divergence(INVARIANT + found.name, "holds", found.text))

    def broken(self, found: Finding) -> Divergence:
        """Convert a finding to a divergence."""
        where = (found.sequence, found.step, found.event, INVARIANT + found.rule)
        divergence = Divergence(*where, "holds", found.text, list(self._recent))
        divergence.broken = BrokenRule(found.rule, found.text, found.value, found.limit, not found.is_last)
        return divergence

    def crashed(self, error: Exception) -> Divergence:
        """Convert an unexpected exception to a divergence after the log's last record. The engine that wrote
        the log may have crashed with the same exception.
        """
        assert self.last is not None  # At least one record was applied.
        where = (self.last.sequence, self.last.step, type(self.last.event).__name__, CRASH)
        return Divergence(*where, "the log ends", place_of(error), list(self._recent))

    def check_invariants(self) -> None:
        """Raise Diverged if the records so far break an invariant."""
        if self.watcher is None or self.last is None or (found := self.watcher.broken) is None:
            return
        kind = type(self.last.event).__name__
        where = (self.last.sequence, self.last.step, kind, INVARIANT + found.name)
        raise Diverged(Divergence(*where, "holds", found.text, list(self._recent)))

    def commit(self) -> bool:
        return True

    def sync(self) -> None:
        """Do nothing, because a replay writes nothing."""

    def tidy(self) -> None:
        """Do nothing, because a replay stores nothing."""

    def close(self) -> None:
        """Do nothing, because a replay opens nothing."""

    def _count(self, record: Record) -> None:
        report, event = self._report, record.event
        report.events += 1
        if isinstance(event, ev.Executed):
            report.steps += 1
            report.tokens += len(event.token_ids) // 4
        elif isinstance(event, ev.Queued):
            report.requests += 1
        elif isinstance(event, ev.Checkpoint):
            report.checkpoints += 1
            self.agreed = record
        if self._progress is not None:
            self._progress(record)

    def _expect(self) -> Record:
        if self.next is None:
            raise LogEnded
        return self.next

    def divergence(self, name: str, logged: Any, derived: Any, event: ev.Event | None = None) -> Divergence:
        """Return a divergence in the field `name` of the next record. `event`: the event that the replay
        produced instead, or None.
        """
        record = self._expect()
        where = (record.sequence, record.step, type(record.event).__name__, name)
        found = Divergence(*where, readable(logged), readable(derived), list(self._recent))
        found.events = record.event, event
        return found

    def located(self, found: Divergence, state: State) -> Divergence:
        """Return the divergence after adding its requests and the rule that the logged decision breaks. If
        digests differ, also add the columns and requests in which the states differ.
        """
        found.rows = {
            row: state.requests_by_row[row].request.request_id
            for row in (*state.running.tolist(), *state.step_rows.tolist())
            if state.requests_by_row[row] is not None
        }
        found.last_rows = state.last_rows.tolist()
        if found.broken is None and self.next is not None and not found.field.startswith(INVARIANT):
            found.broken = first_broken_rule(state, self.next.event)
        if found.event == ev.Checkpoint.__name__ and found.field in ev.Checkpoint.__struct_fields__:
            event = self._expect().event
            assert isinstance(event, ev.Checkpoint)
            found.columns, found.requests = where_apart(state, event)
            if self.agreed is not None:
                found.agreed = self.agreed.sequence, self.agreed.step
        return found


def _begins_process(record: Record, following: Record | None) -> bool:
    """Return whether this record is the first record of a new process, whose clock begins at another time.

    A process's first record is RECOVERED, or a FAILED that blames a step and directly precedes RECOVERED.
    """
    if isinstance(record.event, ev.Failed) and following is not None:
        record = following
    return isinstance(record.event, ev.Recovered)


def _int32(column: bytes | None) -> np.ndarray | None:
    return None if column is None else np.frombuffer(column, np.int32)


def _observation_behind(event: ev.Event) -> ev.Event | None:
    """Return the observation that makes the engine log this event, or None if the event is a decision.

    If a request is rejected on arrival, the engine logs only FINISHED. The observation is then QUEUED.
    """
    if isinstance(
        event,
        (
            *(ev.Queued, ev.GrammarReady, ev.GrammarFailed, ev.Cancelled, ev.Delivered, ev.CacheReset),
            *(ev.Offered, ev.Arrived, ev.Lost, ev.AdapterLoaded, ev.AdapterUnloaded),
            *(ev.SessionOpened, ev.Appended, ev.SessionClosed, ev.Drafted),
        ),
    ):
        return event
    if isinstance(event, ev.Finished) and event.reason == "rejected":
        return ev.Queued(event.request_id, b"", SamplingParams())
    return None

"""Verify a log: run the loop again on its observations and compare every derived event.

The log itself is the loop's executor, source and sink. No model, no device and no clock is needed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.engine import EngineCore
from mmengine.core.executor import StepPlan, StepResult
from mmengine.core.state.digest import checkpoint, where_apart
from mmengine.core.state.state import State
from mmengine.core.step_result import prompt_logprobs
from mmengine.errors import ExecutorFailed, LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.lock import is_locked
from mmengine.events.log_end import log_end
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.invariants import find_broken
from mmengine.replay.verify_report import Divergence, VerifyReport, readable
from mmengine.request import SamplingParams

_OBSERVATIONS = frozenset(ev.OBSERVATIONS)
RECENT = 8  # Observations shown with a divergence.
INVARIANT = "invariant "  # Prefix for the `field` of a broken invariant.


# These leave the loop from inside an executor or a sink. They do not derive from `Exception`, because the
# loop turns an executor's exceptions into FAILED.


class _Diverged(BaseException):
    def __init__(self, divergence: Divergence):
        super().__init__(divergence.field)
        self.divergence = divergence


class _Crashed(BaseException):
    """The process ended here, and another continued: RECOVERED comes next."""


class _Blamed(BaseException):
    """The process ended here, and its successor blames a step: FAILED comes next, then RECOVERED."""

    def __init__(self, cause: str, recovered: ev.Recovered):
        super().__init__(cause)
        self.cause, self.recovered = cause, recovered


class _LogEnded(BaseException):
    """The loop would continue where the log stops: a crash cut the step short."""


class _Tape:
    """The log as executor, source and sink in a replay."""

    needs_plan = False
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
        self.watched: State | None = None  # The state whose invariants must hold between any two records.
        self.agreed: Record | None = None  # The last equal digest.

    # Executor

    def dispatch(self, plan: StepPlan) -> None:
        """Do nothing: the log has the step's result."""

    def collect(self) -> StepResult:
        event = self._expect().event
        if isinstance(event, ev.Recovered):
            raise _Crashed
        if isinstance(event, ev.Failed):
            raise ExecutorFailed(event.error)
        if not isinstance(event, ev.Executed):
            raise _Diverged(self.divergence("event", type(event).__name__, "Executed"))
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
        )

    def discard(self) -> None:
        """Do nothing: the log has no results for steps after a failed step."""

    # Source

    def drain(self) -> Iterator[ev.Event]:
        """Yield the log's next observations. Each comes back through `append` before the next."""
        return self._observations(_observation_behind)

    def leavers(self) -> Iterator[ev.Event]:
        leaves = (ev.Cancelled, ev.GrammarFailed)
        return self._observations(lambda event: event if isinstance(event, leaves) else None)

    def _observations(self, choose: Callable[[ev.Event], ev.Event | None]) -> Iterator[ev.Event]:
        while self.next is not None and (observation := choose(self.next.event)) is not None:
            before = self.next.sequence
            yield observation
            if self.next is not None and self.next.sequence == before:
                raise _Diverged(self.divergence("event", type(observation).__name__, "nothing"))

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
                raise _Blamed(logged.error, following.event)

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        self.check_invariants()
        record = self._expect()
        logged = record.event
        if isinstance(logged, ev.Recovered) and not isinstance(event, ev.Recovered):
            raise _Crashed
        if type(event) is not type(logged):
            if isinstance(logged, ev.Failed):
                self._raise_if_blamed(logged)
            raise _Diverged(self.divergence("event", type(logged).__name__, type(event).__name__))
        if event != logged:
            name = next(n for n in event.__struct_fields__ if getattr(event, n) != getattr(logged, n))
            raise _Diverged(self.divergence(name, getattr(logged, name), getattr(event, name)))
        if step != record.step:
            raise _Diverged(self.divergence("step", record.step, step))
        following = next(self._records, None)
        if (
            self.last is not None
            and record.mono_ns < self.last.mono_ns
            and not _begins_process(record, following)
        ):
            raise _Diverged(self.divergence("mono_ns", record.mono_ns, f"{self.last.mono_ns} or later"))
        self._count(record)
        if type(logged) in _OBSERVATIONS:
            self._recent.append(record)
        self.last, self.next = record, following

    def check_invariants(self) -> None:
        """Raise _Diverged for an invariant that the previous record broke."""
        if self.watched is None or self.last is None or (found := find_broken(self.watched)) is None:
            return
        kind = type(self.last.event).__name__
        where = (self.last.sequence, self.last.step, kind, INVARIANT + found.name)
        raise _Diverged(Divergence(*where, "holds", found.text, list(self._recent)))

    def commit(self) -> bool:
        return True

    def sync(self) -> None:
        """Do nothing: a replay writes nothing."""

    def tidy(self) -> None:
        """Do nothing: a replay stores nothing."""

    def close(self) -> None:
        """Do nothing: a replay opens nothing."""

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
            raise _LogEnded
        return self.next

    def divergence(self, name: str, logged: Any, derived: Any) -> Divergence:
        record = self._expect()
        kind = type(record.event).__name__
        recent = list(self._recent)
        return Divergence(
            record.sequence, record.step, kind, name, readable(logged), readable(derived), recent
        )

    def located(self, found: Divergence, state: State) -> Divergence:
        """Return the divergence, with the place where the states differ if their digests do."""
        if found.event == ev.Checkpoint.__name__ and found.field in ev.Checkpoint.__struct_fields__:
            event = self._expect().event
            assert isinstance(event, ev.Checkpoint)
            found.columns, found.requests = where_apart(state, event)
            if self.agreed is not None:
                found.agreed = self.agreed.sequence, self.agreed.step
        return found


def _begins_process(record: Record, following: Record | None) -> bool:
    """Return whether a new process, with its own clock, wrote this record but not the previous one.

    This is RECOVERED, or the blame for a step just before it.
    """
    if isinstance(record.event, ev.Failed) and following is not None:
        record = following
    return isinstance(record.event, ev.Recovered)


def _int32(column: bytes | None) -> np.ndarray | None:
    return None if column is None else np.frombuffer(column, np.int32)


def _observation_behind(event: ev.Event) -> ev.Event | None:
    """Return the observation that made the engine log this event first; None for a decision."""
    if isinstance(
        event,
        (
            *(ev.Queued, ev.GrammarReady, ev.GrammarFailed, ev.Cancelled, ev.Delivered, ev.CacheReset),
            *(ev.Offered, ev.Arrived, ev.Lost, ev.AdapterLoaded, ev.AdapterUnloaded),
            *(ev.SessionOpened, ev.Appended, ev.SessionClosed),
        ),
    ):
        return event
    if isinstance(event, ev.Finished) and event.reason == "rejected":
        return ev.Queued(event.request_id, b"", SamplingParams())
    return None


def verify(
    folder: Path,
    progress: Callable[[Record], None] | None = None,
    after: int | None = None,
    *,
    invariants: bool = False,
) -> VerifyReport:
    """Fold a log and derive its decisions again.

    `progress` is called with each record. `after` begins at the newest snapshot before that record, see
    CheckedLog. `invariants` also checks replay/invariants.py's invariants after each record; a violation is a
    divergence whose field is INVARIANT and its name.

    Raises LogError when there is no log, CorruptLog for a damaged file or another format.
    """
    had_writer = is_locked(folder)
    log = CheckedLog(folder, after=after)
    report = VerifyReport(
        begins_after=log.begins_after,
        logged_version=log.started.decision_version,
        logged_engine=log.started.engine_version,
        version=DECISION_VERSION,
    )
    report.rederived = log.started.decision_version == DECISION_VERSION
    tape = _Tape(iter(log), report, progress)
    state = _derive(tape, log, invariants) if report.rederived else _fold(tape, log, invariants)
    if not isinstance(state, Divergence):
        try:
            tape.check_invariants()
        except _Diverged as diverged:
            state = diverged.divergence
    if isinstance(state, Divergence):
        report.divergence = state
    else:
        report.unfinished = list(state.requests)
    report.torn = log.torn
    report.end = log_end(folder, had_writer)
    return report


def _derive(tape: _Tape, log: CheckedLog, invariants: bool) -> State | Divergence:
    core: EngineCore | None = None
    try:
        core = EngineCore(
            log.config,
            tape,
            sink=tape,
            source=tape,
            clock=lambda: 0,
            started=log.started,
            state=log.first_state() if log.begins_after >= 0 else None,
        )
        tape.watched = core.state if invariants else None
        while tape.next is not None:
            here = tape.next.sequence
            try:
                _advance(core, tape.next.event)
            except _Crashed:
                continue  # RECOVERED is next.
            except _Blamed as blamed:
                core.recover(blamed.recovered, blamed.cause)
            except MMEngineError:
                if tape.next is None or not isinstance(tape.next.event, ev.Recovered):
                    raise
            if tape.next is not None and tape.next.sequence == here:
                return tape.divergence("event", type(tape.next.event).__name__, "nothing")
    except _Diverged as diverged:
        return diverged.divergence if core is None else tape.located(diverged.divergence, core.state)
    except _LogEnded:
        pass
    except LogError:
        raise
    except MMEngineError as error:
        if tape.next is not None:  # At the end of the log the live engine stopped here too.
            return tape.divergence("event", type(tape.next.event).__name__, str(error))
    except Exception as error:
        culprit = tape.last or log.record
        if culprit is None:
            raise
        raise log.contradiction(culprit, error) from error
    assert core is not None  # STARTED comes first, and creates the core.
    return core.state


def _advance(core: EngineCore, coming: ev.Event) -> None:
    match coming:
        case ev.Checkpoint():
            core.checkpoint()
        case ev.Recovered():
            core.recover(coming)
        case ev.Delivered():  # Closing writes DELIVERED with no step after it.
            core.record_delivered(coming)
        case _:
            core.step()


def _fold(tape: _Tape, log: CheckedLog, invariants: bool) -> State | Divergence:
    """Apply every event unchanged, and compare the digests."""
    state = log.first_state()
    tape.watched = state if invariants else None
    while tape.next is not None:
        event = tape.next.event
        if isinstance(event, ev.Checkpoint):
            event = checkpoint(state)
        try:
            tape.append(event, state.step_of(event), 0)
        except _Diverged as diverged:
            return tape.located(diverged.divergence, state)
        with log.naming(tape.last):
            log.apply(state, event)
    return state

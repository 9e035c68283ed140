"""Verifies a log recorded from a host's scheduler (vLLM's): derives each scheduling call's decisions again,
and compares them with the log.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog, LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.host_rules import HostRules, rules_for
from mmengine.replay.hosted.derived_engine import DerivedEngine
from mmengine.replay.hosted.engines import Ended, HostEngine, own_rules, own_scheduler
from mmengine.replay.hosted.outcome import CALL_EVENTS, Outcome, RecordedRows, first_difference
from mmengine.replay.tape import INVARIANT, RECENT, Diverged
from mmengine.replay.verify_report import Divergence, VerifyReport

# The maximum for `max_waiting`, because vLLM does not limit the number of waiting requests.
MAX_WAITING = 2**20
_NOT_COMPARED = (ev.Checkpoint, ev.Delivered, ev.Stalled, ev.Started)
PROGRESS = "progress"  # Invariant: a call schedules a request if possible.
_CALL_ORDER = {ev.Preempted: 0, ev.Evicted: 1, ev.Scheduled: 2, ev.Admitted: 3}


def verify_hosted(
    log: CheckedLog,
    progress: Callable[[Record], None] | None = None,
    rules: HostRules | None = None,
    own: str = "",
) -> VerifyReport:
    """Return the verification report for a log with a host's decisions. `rules`: used in place of the rules
    for the host's version. `own`: the name of the host's own scheduler, which then derives the decisions (see
    `own_scheduler`), or "" for this build's rules. Raises CorruptLog for contradictory records, and LogError
    if the host's own scheduler is not available.
    """
    rules = rules or (own_rules(own, log.started) if own else rules_for(log.started))
    engine: HostEngine | None = None
    if own and rules.compat:
        engine = own_scheduler(own, log.started, log.config)
    elif rules.compat:
        config = msgspec.structs.replace(log.config, compat=rules.compat, max_waiting=MAX_WAITING)
        with log.naming():
            engine = DerivedEngine(config, log.started.host)
    report = VerifyReport(
        begins_after=log.begins_after,
        rederived=bool(rules.compat) and not rules.caveat,
        logged_version=log.started.decision_version,
        logged_engine=log.started.engine_version,
        version=DECISION_VERSION,
        host=log.started.host,
        rules=rules.name,
        own=own,
        caveat=rules.caveat,
    )
    verifier = HostedVerifier(log, engine, report, progress)
    try:
        for record in log:
            verifier.take(record)
        verifier.finish()
    except Diverged as diverged:
        report.divergence = diverged.divergence
    report.unfinished = list(verifier.live)
    return report


class RecordSource(Protocol):
    """Supplies the first state and applies records. Errors become a CorruptLog that names the record.
    CheckedLog implements this protocol.
    """

    config: EngineConfig

    def first_state(self) -> State: ...

    def naming(self, record: Record | None = None) -> AbstractContextManager[None]: ...

    def apply(self, state: State, event: ev.Event) -> None: ...

    def contradiction(self, record: Record, error: Exception) -> CorruptLog: ...


class HostedVerifier:
    """Passes a log's records to an engine that derives the decisions, and compares the decisions with the
    log. `engine`: if None, the records are only applied to a state. `report` receives the counts.
    """

    def __init__(
        self,
        log: RecordSource,
        engine: HostEngine | None,
        report: VerifyReport,
        progress: Callable[[Record], None] | None = None,
    ):
        self._log, self._report, self._progress = log, report, progress
        self._engine = engine
        self._folded = log.first_state() if self._engine is None else None
        self._rows = RecordedRows(log.config.block_size)
        self._is_over = False  # Whether the remaining records are only counted.
        self._call: list[Record] = []  # The records of the scheduling call that is being read.
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self._last: Record | None = None
        self.live: dict[str, None] = {}

    def take(self, record: Record) -> None:
        """Process the next record. Raises Diverged at the first difference."""
        self._count(record)
        self._last, event = record, record.event
        if self._is_over:
            return
        if self._folded is not None:
            with self._log.naming():
                self._log.apply(self._folded, event)
            return
        if isinstance(event, CALL_EVENTS) and not self._is_expected_end(event):
            if self._call and not _continues(self._call[-1].event, event):
                self._compare_call()
            self._call.append(record)
            return
        self._compare_call()
        if self._engine is None or isinstance(event, _NOT_COMPARED):
            return
        try:
            self._apply(record, self._engine)
        except (Diverged, LogError):
            raise
        except Exception as error:
            raise self._log.contradiction(record, error) from error

    def finish(self) -> None:
        """Compare the last call, and store in the report which requests the rules would schedule next.
        Missing FINISHED and PREEMPTED records at the end are no error, because a killed host may not have
        written them. Raises Diverged if requests are left but none can be scheduled.
        """
        self._compare_call()
        engine = self._engine
        if engine is None or self._is_over or engine.ends or engine.has_flights:
            return
        self._report.left_over = engine.left_over()
        if self._last is not None and not self._report.left_over and (text := engine.stalled()):
            raise self._diverged(self._last, INVARIANT + PROGRESS, "holds", text)

    def _apply(self, record: Record, engine: HostEngine) -> None:
        event = record.event
        if isinstance(event, ev.Finished) and event.reason != "rejected" or isinstance(event, ev.Preempted):
            self._compare_end(record, event, engine)
            return
        if engine.ends:
            missing = engine.ends[0]
            raise self._diverged(record, "event", type(event).__name__, _described(missing))
        match event:
            case ev.Executed() | ev.Failed():
                engine.collect(event)
            case ev.Dispatched():
                engine.dispatch()
            case ev.Drafted(rows=rows):
                engine.draft(event, self._rows.names_of(rows))
            case ev.Noted() if engine.note(event):
                pass
            case ev.Noted(kind=kind, detail=detail):
                what = f"{kind} ({detail})" if detail else kind
                self._report.caveat = f"record {record.sequence} notes: {what}"
                self._report.rederived, self._is_over = False, True
            case ev.Finished():
                pass  # The host refused the request before it was queued.
            case _:
                engine.drop_empty_step()
                engine.observe(event)

    def _is_expected_end(self, event: ev.Event) -> bool:
        """Return whether `event` is a PREEMPTED after a cache reset, outside of a scheduling call."""
        if self._engine is None or not self._engine.ends or not isinstance(event, ev.Preempted):
            return False
        return isinstance(self._engine.ends[0], ev.Preempted)

    def _compare_end(self, record: Record, event: Ended, engine: HostEngine) -> None:
        if not engine.ends:
            raise self._diverged(record, "event", _described(event), "nothing")
        derived = engine.ends.popleft()
        names = ("request_id", "reason") if isinstance(event, ev.Finished) else ("request_id",)
        if type(derived) is not type(event):
            raise self._diverged(record, "event", _described(event), _described(derived))
        for name in names:
            if getattr(event, name) != getattr(derived, name):
                raise self._diverged(record, name, _described(event), _described(derived))

    def _compare_call(self) -> None:
        call, self._call = self._call, []
        engine = self._engine
        if not call or engine is None:
            return
        if engine.ends:
            raise self._diverged(call[0], "event", type(call[0].event).__name__, _described(engine.ends[0]))
        engine.drop_empty_step()
        try:
            logged = self._rows.outcome(record.event for record in call)
        except ValueError as error:
            raise self._log.contradiction(call[0], error) from error
        waiting = engine.waiting
        try:
            derived = engine.schedule()
        except MMEngineError as error:
            raise self._log.contradiction(call[0], error) from error
        except Exception as error:
            raise self._log.contradiction(call[0], error) from error
        found = first_difference(logged, derived, is_fcfs=engine.config.policy == "fcfs")
        if found is not None:
            rule = engine.rule_of(found, logged, derived, waiting)
            raise self._diverged(call[-1], *found, rule, (logged, derived))
        self._report.calls += 1

    def _diverged(
        self,
        record: Record,
        name: str,
        logged: object,
        derived: object,
        rule: str = "",
        outcomes: tuple[Outcome, Outcome] | None = None,
    ) -> Diverged:
        where = (record.sequence, record.step, type(record.event).__name__)
        recent = list(self._recent)
        return Diverged(Divergence(*where, name, logged, derived, recent, rule=rule, outcomes=outcomes))

    def _count(self, record: Record) -> None:
        report, event = self._report, record.event
        report.events += 1
        match event:
            case ev.Executed():
                report.steps += 1
                report.tokens += len(event.token_ids) // 4
            case ev.Queued():
                report.requests += 1
                self.live[event.request_id] = None
            case ev.Finished():
                self.live.pop(event.request_id, None)
            case ev.Checkpoint():
                report.checkpoints += 1
        if isinstance(event, ev.OBSERVATIONS):
            self._recent.append(record)
        if self._progress is not None:
            self._progress(record)


def _continues(before: ev.Event, event: ev.Event) -> bool:
    """Return whether `event` belongs to the same scheduling call as the preceding event `before`."""
    first, second = (_CALL_ORDER.get(type(each), _CALL_ORDER[ev.Admitted]) for each in (before, event))
    return second > first or (second == first and second in (0, 3))


def _described(event: Ended) -> str:
    return f"{type(event).__name__} {event.request_id} ({event.reason})"

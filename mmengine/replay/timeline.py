"""Opens a log as a Python object, for iterating over events and steps, inspecting states, and running the
scheduler on a logged state.

    log = open_log("run.log")
    step = log.at(120)          # just before step 120 was decided
    step.view.waiting           # the waiting requests
    step.decide()               # calls `schedule` again on this state; set a breakpoint in `schedule`

Iteration applies the logged decisions. Only steps on which `decide` was called are compared with the log.
`verify` compares a whole log.
"""

from collections import deque
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import numpy as np

from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.decide.leases import NO_FREE_BLOCKS
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.columns import CRASHED, LEFT, LOST
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.errors import CorruptLog, Diverged, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings


def open_log(folder: str | PathLike, findings: Findings | None = None) -> "Timeline":
    """Return a log's Timeline. Raises LogError if there is no log, and CorruptLog if the log is damaged.

    `findings` collects the decisions that break a rule. Iteration ends before a decision that cannot be
    applied.
    """
    return Timeline(Path(folder), findings)


_OF_A_STEP = (ev.Scheduled, ev.Admitted, ev.StatesKept, ev.Evicted, ev.Encoded)


def fold(log: CheckedLog) -> Iterator[tuple[State, Record]]:
    """Yield each record with the state before the record. All records share one state object, which changes
    during the iteration. Ends before a decision that cannot be applied.
    """
    state = log.first_state()
    for record in log:
        with log.naming(record):
            log.check(state, record.event)
        if log.is_over:
            return
        yield state, record
        with log.naming(record):
            evolve(state, record.event)


def is_scheduling(state: State, event: ev.Event) -> bool:
    """Return whether the event is a decision of `schedule`. `state`: the state before the event.

    Preemptions after a failed step, a crash or a cache reset are decided by the engine, not by `schedule`.
    """
    match event:
        case ev.Scheduled() | ev.Admitted() | ev.StatesKept() | ev.Evicted() | ev.Encoded() | ev.Fetched():
            return True
        case ev.LeaseTaken(reason=reason):
            return reason == NO_FREE_BLOCKS
        case ev.Preempted(row=row):
            return state.ended[row] not in (LOST, CRASHED) and not state.resetting
    return False


def taken_tokens(state: State, event: ev.Executed) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (row, int32 token ids) for each row that gets tokens. `state`: the state before the event.

    Failed rows and rows whose request ended during the step get no tokens.
    """
    sampled, tokens = state.sampled_rows().tolist(), np.frombuffer(event.token_ids, np.int32)
    counts = [1] * len(sampled) if event.counts is None else np.frombuffer(event.counts, np.int32).tolist()
    broken = {index for index, _ in event.errors}
    end = 0
    for index, (row, count) in enumerate(zip(sampled, counts, strict=True)):
        start, end = end, end + count
        if index not in broken and state.ended[row] != LEFT:
            room = int(state.max_total[row] - state.num_tokens[row])
            yield row, tokens[start : start + min(count, room)]


class Timeline:
    """A log on disk. Each iteration reads the log again. `started`, `config`: from the first record.
    `findings`: the decisions so far that break a rule.
    """

    def __init__(self, folder: Path, findings: Findings | None = None):
        self.folder = folder
        self.findings = Findings() if findings is None else findings
        first = CheckedLog(folder)
        self.started, self.config = first.started, first.config

    def events(self) -> Iterator[tuple[State, Record]]:
        """Yield each record with the state before the record.

        The state object changes during the iteration, so copy the values that you need later. Raises
        CorruptLog if the log is damaged or contradicts itself.
        """
        return fold(CheckedLog(self.folder, findings=self.findings))

    def steps(self) -> Iterator["Step"]:
        """Yield every step that has decisions, in the state before the first decision.

        A step is valid until the iteration continues. Raises the errors of `events`, and Diverged if a call
        of `decide` differed from the log.
        """
        log = CheckedLog(self.folder, findings=self.findings)
        state = log.first_state()
        unread, ahead, decided = iter(log), deque[Record](), -1
        while (record := ahead.popleft() if ahead else next(unread, None)) is not None:
            opens = False
            with log.naming(record):
                opens = record.step > decided and is_scheduling(state, record.event)
                if not opens:
                    log.apply(state, record.event)
            if log.is_over:
                return
            if opens:
                decided = record.step
                logged, following = _decisions(log, state, record, unread)
                step = Step(log, state, logged, following)
                yield step
                if log.is_over:
                    return
                ahead.extend((*logged[step.num_agreed() :], *following))

    def at(self, number: int) -> "Step":
        """Return the step with this number, in the state before its first decision. The step stays valid.

        Raises LogError if the step has no decisions.
        """
        first = last = None
        for step in self.steps():
            if step.number == number:
                return step
            first, last = step.number if first is None else first, step.number
            if last > number:
                break
        seen = f"it has steps {first} to {last}" if first is not None else "it has no steps"
        raise LogError(f"step {number} has no decisions in the log in {self.folder}; {seen}")


class Step:
    """A step before its decisions. `state`: the current state. `view`: the scheduler's read-only view of the
    state.

    `logged`: the decisions in the log, in order. `record`: the log record with the first decision and
    the decision's time. `is_whole`: False if the log may end before the step's last decision.
    """

    def __init__(self, log: CheckedLog, state: State, records: list[Record], following: list[Record]):
        self.record, self._records = records[0], records
        self.number, self.logged = self.record.step, [record.event for record in records]
        self.state, self.view = state, View(state)
        self._scheduler = scheduler_of(state.config)
        self.is_whole = bool(following) and not isinstance(following[0].event, ev.Recovered)
        self._log_continues = bool(following)
        self.decided: list[ev.Event] = []
        self._log = log
        self._is_complete = False

    def next_decision(self) -> ev.Event | None:
        """Apply and return the next decision by this build's scheduler, or return None if the step is
        complete. Raises CorruptLog if the scheduler fails or if the decision cannot be applied.
        """
        try:
            event = self._scheduler.schedule(self.view)
            if event is not None and len(self.decided) < _most_decisions(self.state):
                evolve(self.state, event)
        except Exception as error:
            raise self._log.contradiction(self.record, error) from error
        if event is None:
            self._is_complete = True
            return None
        if len(self.decided) >= _most_decisions(self.state):
            raise CorruptLog(f"the scheduler does not end step {self.number} of this log")
        self.decided.append(event)
        return event

    def decide(self) -> list[ev.Event]:
        """Let this build's scheduler decide the rest of the step, and return all decisions of the step.

        Afterwards, the state is the state just before the step runs. The decisions equal `logged` if the log
        is correct and was written with this build's rules.
        """
        while self.next_decision() is not None:
            pass
        return self.decided

    def follow(self) -> Iterator[ev.Event]:
        """Yield the step's remaining logged decisions, and apply each decision after yielding it. Ends after
        yielding a decision that cannot be applied.
        """
        for record in self._records[len(self.decided) :]:
            yield record.event
            with self._log.naming(record):
                self._log.apply(self.state, record.event)
            if self._log.is_over:
                self.is_whole = False
                return
            self.decided.append(record.event)

    def num_agreed(self) -> int:
        """Return how many logged decisions this build's scheduler repeated. Raises Diverged if a decision
        differs.
        """
        count = min(len(self.decided), len(self.logged))
        apart = self.decided[:count] != self.logged[:count]
        too_many = len(self.decided) > count and self._log_continues
        if apart or too_many or self._is_complete and count < len(self.logged):
            raise Diverged(
                f"step {self.number} was decided differently from the log, so the later steps have no state; "
                "open the log again, or compare `decided` with `logged`"
            )
        return count


def _most_decisions(state: State) -> int:
    """Return an upper limit on the number of events in a step.

    A step frees and assigns each row at most once, and evicts each media item at most once. Each such change
    takes at most one session's lease. A scheduler that exceeds the limit never ends the step.
    """
    moved = 4 * state.config.num_rows + len(state.requests) + len(state.sessions)
    return 2 * moved + len(state.encoder.entries) + 8


def _decisions(
    log: CheckedLog, state: State, first: Record, records: Iterator[Record]
) -> tuple[list[Record], list[Record]]:
    """Return the step's scheduling records, beginning with `first`, and a list with the record that follows
    (or an empty list). No record is applied.
    """
    logged, following = [first], []
    most = _most_decisions(state)
    for record in records:
        same_step = record.step == first.step
        if not same_step or not isinstance(record.event, (*_OF_A_STEP, ev.Preempted, ev.LeaseTaken)):
            following.append(record)
            break
        logged.append(record)
        if len(logged) > most:
            raise log.contradiction(record, ValueError(f"a step with more than {most} decisions"))
    return logged, following

"""Minimizes a log whose recorded decisions break a rule: removes requests as long as the rule stays broken.

The scheduler does not run, so a build without the bug can minimize the log, too.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from mmengine.config import EngineConfig
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.log import LogWriter
from mmengine.events.sink import Sink
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import FOLD
from mmengine.replay.minimize import shrink
from mmengine.replay.minimize.deadline import Deadline
from mmengine.replay.minimize.failures import Failure
from mmengine.replay.minimize.probe import TestParts
from mmengine.replay.minimize.projection import Piece, Projection, piece_of
from mmengine.replay.rerun.script import Script
from mmengine.replay.rules.decisions import broken_rules
from mmengine.replay.watcher import NAMES, Watcher

MAX_CELLS = 2**26  # Maximum sum of all `Piece.num_cells`. The pieces then take about a gigabyte.


class Recording:
    """A log's records up to the first broken rule. `failure`: the failure for this rule. `kept`: the ids of
    the remaining requests, in arrival order. `tried`: the number of tested subsets.
    """

    def __init__(self, config: EngineConfig, pieces: list[Piece], failure: Failure, deadline: Deadline):
        self._config, self._pieces, self._deadline = config, pieces, deadline
        self.failure, self.tried = failure, 0
        self.is_cut_short = False
        queued = (piece.event for piece in pieces)
        self.kept = list(dict.fromkeys(e.request_id for e in queued if isinstance(e, ev.Queued)))
        self.num_requests = len(self.kept)

    def minimize(self, progress: Callable[[int, int], None] = lambda kept, tried: None) -> None:
        """Remove requests until the failure needs every remaining request. A session's requests
        are only removed together, and so are the choices of a request with `n` answers. `progress`: called
        with the numbers of remaining requests and of tested subsets.
        """
        units = self._units()

        def fails(some: list[list[str]]) -> bool:
            if self._deadline.left() < 1.0:
                self.is_cut_short = True
                return False
            self.tried += 1
            kept = {name for unit in some for name in unit}
            failure = self.play(kept)
            if failure is None or not self._is_same(failure):
                return False
            self.failure, self.kept = failure, [name for name in self.kept if name in kept]
            progress(len(self.kept), self.tried)
            return True

        present = [unit for unit in units if not {*self.failure.present}.isdisjoint(unit)]
        if len(present) < len(units) and fails(present):
            units = present
        shrink.fewest(units, fails)

    def play(self, kept: set[str], sink: Sink | None = None) -> Failure | None:
        """Apply the events for the requests `kept`, and return the first failure, or None. All events up to
        the failure are appended to `sink`, including an event that fails.
        """
        state = State(self._config)
        watcher = Watcher(state, {self.failure.kind}, has_outputs=False)
        projection = Projection(state, kept)
        for piece in self._pieces:
            try:
                event = projection.of(piece)
                if event is None:
                    continue
                watcher.before(event)
                if watcher.broken is not None:
                    break
                if sink is not None:
                    sink.append(event, state.step_of(event), piece.record.mono_ns)
                if (broken := _broken_by(state, event)) is not None:
                    return broken
                evolve(state, event)
            except Exception as error:
                return _failure(state, FOLD, f"{type(error).__name__}: {error!s:.200}")
        watcher.check_state()
        return None if watcher.broken is None else _failure(state, *watcher.broken)

    def write(self, folder: Path) -> None:
        """Write a log with the remaining requests."""
        writer = LogWriter(folder)
        try:
            self.play({*self.kept}, writer)
        finally:
            writer.close()

    def _is_same(self, failure: Failure) -> bool:
        """Return whether a failure has the same signature as the log's failure. For wrong prefix cache hits,
        the numbers in the texts must be equal, too. These numbers change when the request that computed the
        hit blocks is removed.
        """
        if failure.kind == "hits":
            return failure[:2] == self.failure[:2]
        return failure.signature == self.failure.signature

    def _units(self) -> list[list[str]]:
        """Return groups of requests. A group can be removed only as a whole."""
        unit_of: dict[str, str] = {}
        session_of: dict[str, str] = {}
        for event in (piece.event for piece in self._pieces):
            if isinstance(event, ev.Appended):
                session_of[event.request_id] = f"session {event.session_id}"
            elif isinstance(event, ev.Queued):
                own = session_of.get(event.request_id, f"request {event.request_id}")
                unit_of[event.request_id] = unit_of.get(event.group, own)
        units = defaultdict[str, list[str]](list)
        for name in self.kept:
            units[unit_of[name]].append(name)
        return list(units.values())


def read_recording(folder: Path, kind: str, deadline: Deadline | None = None) -> Recording | None:
    """Return a log's records up to the first broken rule, or None if the log breaks no rule. `kind`: a rule's
    name, or "any". Returns None for a log whose beginning was deleted. Raises LogError for a log that takes
    too much memory. Also raises CheckedLog's errors.
    """
    deadline = deadline or Deadline()
    log = CheckedLog(folder)
    if log.begins_after >= 0:
        return None
    state = log.first_state()
    watcher = Watcher(state, NAMES if kind == "any" else {kind}, has_outputs=False)
    pieces: list[Piece] = []
    num_cells = 0
    failure: Failure | None = None
    for record in log:
        deadline.check()
        with log.naming(record):
            watcher.before(record.event)
            if watcher.broken is not None:
                failure = _failure(state, *watcher.broken)
                break
            pieces.append(_split(state, record))
            num_cells += pieces[-1].num_cells
            if num_cells > MAX_CELLS:
                raise LogError(
                    f"the log in {folder} is too large: minimizing it needs more than a GB of memory"
                )
            watcher.check_decision(record.event)
            if watcher.broken is not None:
                failure = _broken_by(state, record.event)
                break
            log.check(state, record.event)
            evolve(state, record.event)
    if failure is None and log.findings.last is not None and kind == "any":
        failure = _failure(state, log.findings.last.rule, log.findings.last.text)
    if failure is None and not log.is_over:
        watcher.check_state()
        failure = None if watcher.broken is None else _failure(state, *watcher.broken)
    return None if failure is None else Recording(log.config, pieces, failure, deadline)


def _split(state: State, record: Record) -> Piece:
    try:
        return piece_of(state, record)
    except Exception:  # An invalid record cannot be split, and is kept unchanged.
        return Piece(record, record.event)


def _broken_by(state: State, event: ev.Event) -> Failure | None:
    """Return a failure for the first rule that an event breaks, with all texts for this rule, or None."""
    first: str | None = None
    texts: list[str] = []
    for broken in broken_rules(state, event):
        first = first or broken.rule
        if broken.rule == first:
            texts.append(broken.text)
        if not broken.can_fold:
            break
    return None if first is None else _failure(state, first, "; ".join(texts))


def _failure(state: State, kind: str, what: str) -> Failure:
    return Failure(kind, what, state.step, tuple(state.requests))


_BODY = """    failure = replay_failure(log, "{kind}")
    assert failure is None, failure"""


class RecordedProbe:
    """A probe for a failure in the log's recorded decisions."""

    def __init__(self, recording: Recording):
        self._recording = recording

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        """Return the recording's failure. The scheduler does not run."""
        return self._recording.failure

    def check_first(self, failure: Failure) -> None:
        """Accept every failure."""

    def write(self, script: Script, folder: Path) -> None:
        self._recording.write(folder)

    def of_log(self, folder: Path) -> Failure | None:
        kind = self._recording.failure.kind
        found = read_recording(folder, "any" if kind == FOLD else kind)
        return None if found is None else found.failure

    def test(self, failure: Failure) -> TestParts:
        title = (
            f"The log's decisions break the rule {failure.kind}. The installed build must decide otherwise."
        )
        imports = "from mmengine.replay import replay_failure\n"
        kind = "any" if failure.kind == FOLD else failure.kind
        return TestParts(failure.kind, title, imports, _BODY.format(kind=kind))

"""Computes the engine's state at any position in a log.

A position is the number of a record. The state at a position is the state before this record is applied.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.segment import segment_paths
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.debug.records import RecordFile
from mmengine.replay.debug.saved.copied_state import CopiedState
from mmengine.replay.debug.saved.kept_states import MIN_RECORDS, KeptStates
from mmengine.replay.debug.saved.live_requests import LiveRequests
from mmengine.replay.debug.saved.marks import MAX_BYTES, Mark, Marks, SavedState
from mmengine.replay.debug.saved.packed_state import PackedState
from mmengine.replay.debug.saved.request_table import RequestTable
from mmengine.replay.findings import Findings
from mmengine.replay.rerun.clock import SteadyClock

MAX_NAMES = 2**22  # Maximum number of requests whose arrivals are remembered.


class Cursor:
    """A state that moves forward through the log. `record`: the next record, or None at the end. `time_ns`:
    the record's time since the log's first record.
    """

    def __init__(self, log: CheckedLog, state: State, clock: SteadyClock, position: int):
        self.state, self.position, self.clock = state, position, clock
        self._log, self._records = log, iter(log)
        self.record: Record | None = None
        self.time_ns = 0
        self._read()

    def advance(self) -> None:
        """Apply the next record, and read the record after it. Does nothing at the end."""
        record = self.record
        if record is None:
            return
        with self._log.naming(record):
            evolve(self.state, record.event)
        if self._log.is_over:
            self.record = None
            return
        self.position = record.sequence + 1
        self._read()

    def _read(self) -> None:
        self.record = record = next(self._records, None)
        if record is None:
            return
        with self._log.naming(record):
            self._log.check(self.state, record.event)
            self.time_ns = self.clock.of(record)
        if self._log.is_over:
            self.record = None


class Navigator:
    """A log, with the state at `position`. A move may replace the object `state`.

    `max_bytes`: maximum total size of the state copies in memory. `findings`: see CheckedLog. `progress` is
    called with the position every 4096 records while records are read for the first time. Raises the same
    errors as `verify`.
    """

    def __init__(
        self,
        folder: Path,
        findings: Findings | None = None,
        max_bytes: int = MAX_BYTES,
        progress: Callable[[int], None] = lambda position: None,
    ):
        self.folder, self.progress = folder, progress
        self.log = CheckedLog(folder, findings=findings)
        self.findings, self.started, self.config = self.log.findings, self.log.started, self.log.config
        self._file = RecordFile(segment_paths(folder))
        self._base: PackedState | None = None  # the copy against which later copies are compressed
        state = self.log.first_state()
        self.first = self.log.begins_after + 1
        requests = LiveRequests(RequestTable(), self.config)
        saved = self._saved(state, self.first, requests)
        self.marks = Marks(Mark(self.first, state.step, 0, 0, 0, saved), requests, max_bytes)
        self._is_interrupted = False
        self.end: int | None = None  # The position after the last record, or None while it is unknown.
        self.arrivals: dict[str, list[int]] = {}  # Maps a request id to the positions of its QUEUED records.
        self._frontier = self.first  # All records before this position have been read.
        self._kept = KeptStates(folder, self.started, self.first)
        self._num_kept = 1
        self.arrivals, self._frontier = self._kept.load(self.marks, self._records_from)
        self._num_kept = len(self.marks.all)
        self.cursor = self._cursor_at(self.marks.all[0], state)

    @property
    def position(self) -> int:
        return self.cursor.position

    @property
    def state(self) -> State:
        return self.cursor.state

    @property
    def record(self) -> Record | None:
        return self.cursor.record

    def keep(self) -> None:
        """Write a long log's new saved states to the user's cache directory."""
        last = self.marks.last
        if self.findings or len(self.marks.all) == self._num_kept:
            return
        record = next(self._records_from(last), None)
        if last.position - self.first >= MIN_RECORDS and record is not None:
            self._kept.save(self.marks, self.arrivals, record)
            self._num_kept = len(self.marks.all)

    def _records_from(self, mark: Mark) -> Iterator[Record]:
        return self._file.records(mark.position, mark.offset)

    def advance(self) -> None:
        """Apply the next record."""
        self._advance(self.cursor)

    def go(self, position: int) -> None:
        """Move to a position. If the position is after the end, move to the end."""
        here = self.position
        mark = self.marks.before(min(position, self._frontier))
        if position < here or mark.position > here:
            self.cursor = self._cursor_at(mark, mark.saved.restore())
        cursor = self.cursor
        while cursor.position < position and cursor.record is not None:
            self._advance(cursor)

    def walk(self, position: int) -> Iterator[Cursor]:
        """Yield a new cursor at `position`, then the same cursor after each record. The navigator does not
        move.
        """
        mark = self.marks.before(min(position, self._frontier))
        cursor = self._cursor_at(mark, mark.saved.restore())
        while cursor.record is not None and cursor.position < position:
            self._advance(cursor)
        while cursor.record is not None:
            yield cursor
            self._advance(cursor)
        yield cursor

    def interrupt(self) -> None:
        """Make all moves raise LogError at their next record, including a move that runs in another
        thread.
        """
        self._is_interrupted = True

    def reload(self) -> None:
        """Compute the state at this position again, because an interrupted move may have applied half a
        record.
        """
        self.cursor = next(self.walk(self.position))

    def _advance(self, cursor: Cursor) -> None:
        if self._is_interrupted:
            raise LogError(f"interrupted at record {cursor.position}")
        cursor.advance()
        record = cursor.record
        if cursor.position <= self._frontier and record is not None:
            return
        self._frontier = max(self._frontier, cursor.position)
        if record is None:
            self.end = cursor.position
            return
        self._note(cursor, record)

    def _note(self, cursor: Cursor, record: Record) -> None:
        """Process a record that is read for the first time: store an arrival's position, and save the state
        if a copy is due.
        """
        event = record.event
        if isinstance(event, ev.Queued) and len(self.arrivals) < MAX_NAMES:
            self.arrivals.setdefault(event.request_id, []).append(record.sequence)
        if record.sequence % 4096 == 0:
            self.progress(record.sequence)
        num_unsaved = record.sequence - self.marks.last.position
        every = self.marks.every_records
        is_good = isinstance(event, ev.Checkpoint) or num_unsaved >= 2 * every
        if num_unsaved >= every and is_good and _is_packable(cursor.state):
            saved = self._saved(cursor.state, record.sequence, self.marks.requests)
            clock_ns = cursor.time_ns - record.mono_ns
            place = record.step, cursor.time_ns, clock_ns, record.offset
            self.marks.add(Mark(record.sequence, *place, saved))

    def _saved(self, state: State, position: int, requests: LiveRequests) -> SavedState:
        # Wrong decisions can lead to a state that a snapshot cannot represent.
        if not self.findings:
            copy = PackedState.of(state, self.started, position, requests, self._base)
            if copy.base is None and self._base is not None:
                self._base.unpacked_base = b""
            self._base = copy.base or copy
            return copy
        return CopiedState(state)

    def _cursor_at(self, mark: Mark, state: State) -> Cursor:
        records = self._records_from(mark)
        clock = SteadyClock()
        if mark.position > self.first:
            clock.resume(mark.clock_ns, mark.time_ns)
        return Cursor(self.log.resumed(records, state, mark.position), state, clock, mark.position)


def _is_packable(state: State) -> bool:
    """Return whether a snapshot can represent the state. Snapshots cannot contain blocks that arrive from a
    block store, or tokens that vLLM's asynchronous scheduler computed before a preemption.
    """
    return not state.step_fetched and not state.stale and not state.stopped

"""Checks a log's records while a replay reads them, because a log may come from an untrusted source.

A record is either an observation (an input of the engine, such as an arrival or a result) or a decision of
the scheduler. An observation that contradicts the earlier records raises CorruptLog with the record's number.
A record that would make a replay take too much memory or never end also raises CorruptLog. A decision that
breaks a rule of the state is a finding (findings.py) instead. If the state can take the decision, the replay
continues. Otherwise the iteration ends before the decision's record, and readers return their result up to
this record.
"""

from collections.abc import Callable, Iterator
from copy import copy
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.decide.request_checks import check_content
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.first_events import constants_of
from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot.snapshot import filled, newest_before, oldest_after
from mmengine.core.state.policy import policy_named
from mmengine.core.state.state import State
from mmengine.errors import ConfigError, CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.follower import LogFollower
from mmengine.events.log import LogReader
from mmengine.events.log_end import log_end
from mmengine.events.recovery import Cut
from mmengine.events.segment import segment_paths
from mmengine.replay.findings import FOLD, BrokenRule, Finding, Findings
from mmengine.replay.host_rules import rules_for
from mmengine.replay.rules.common import MalformedColumn
from mmengine.replay.rules.decisions import broken_rules
from mmengine.replay.rules.observations import check_observation

_CHECKED = frozenset((ev.Started, ev.Queued, ev.Finished))
_OBSERVATIONS = frozenset(ev.OBSERVATIONS)
# Limit on the cells (rows x tokens, or KV slots) that the settings of a log may demand of a replay.
MAX_CELLS = 2**31


class CheckedLog:
    """Iterates over the records of the log in a folder. `record` is the current record.

    `wait`: called when a log that is still being written has no more records. If `wait` returns False, the
    iteration ends. `after`: a record number. The iteration then begins after the newest snapshot before this
    record. Without `after`, the iteration begins with the first record, or after the oldest snapshot if the
    log's beginning was deleted.

    `begins_after` is the record number of the snapshot, or -1 without a snapshot. `first` is the first
    record, if any. `findings` collects the decisions that break a rule. Several readers may share a
    `findings` object.

    Raises LogError if there is no log, and CorruptLog for a damaged file or another format.
    """

    def __init__(
        self,
        folder: Path,
        wait: Callable[[], bool] | None = None,
        after: int | None = None,
        findings: Findings | None = None,
    ):
        self.findings = Findings() if findings is None else findings
        self.is_over = False  # Whether the next record cannot be applied.
        self._is_doubtful = False  # Whether an earlier record broke a rule.
        self._named: Record | None = None  # The record of the innermost `naming` block.
        while wait is not None and not segment_paths(folder) and wait():
            pass  # The log has no records yet.
        self._reader: LogReader | LogFollower = LogReader(folder)
        base = None
        if after is not None:
            base = newest_before(folder, after)
        elif self._reader.first_sequence:
            base = oldest_after(folder, self._reader.first_sequence - 1)
        if wait is not None:
            self._reader = LogFollower(folder, wait, 0 if base is None else base[1].sequence + 1)
        elif base is not None:
            self._reader = LogReader(folder, start=base[1].sequence + 1)
        self._base = base[1] if base is not None else None
        self.begins_after = -1 if self._base is None else self._base.sequence
        self._records: Iterator[Record] = (
            record for record in self._reader if record.sequence > self.begins_after
        )
        self.first = self.record = next(self._records, None)
        self.started = self._started(folder)
        self.config = _replay_config(self.started, folder)
        self._live: set[str] = set() if base is None else set(base[0].requests)
        self._begins = base is None  # Whether the first record is STARTED.

    def resumed(self, records: Iterator[Record], state: State, position: int) -> "CheckedLog":
        """Return another reader of this log, which begins at record `position`. `records`: the records from
        `position` on. `state`: the state before these records. Both readers share `findings`.
        """
        log = copy(self)
        log.is_over = False
        log._is_doubtful = bool(self.findings) and self.findings.listed[0].sequence < position
        log.begins_after, log._begins = position - 1, position == 0
        log._records, log._live = records, set(state.requests)
        log.first = log.record = next(records, None)
        return log

    def _started(self, folder: Path) -> ev.Started:
        if self._base is not None:
            return self._base.started
        if self.first is None and (end := log_end(folder)).kind:
            raise CorruptLog(f"{folder} contains no record; {end.text}", end.kind)
        if self.first is None or not isinstance(self.first.event, ev.Started):
            raise CorruptLog(f"{folder} does not begin with STARTED, so the log is incomplete")
        return self.first.event

    def first_state(self) -> State:
        """Return the state before the first record."""
        if self._base is not None:
            return filled(self._base)
        with self.naming():
            return State(self.config)

    @property
    def torn(self) -> Cut | None:
        """The position at which the iteration ended, if the bytes at this position are not a complete
        record.
        """
        return self._reader.torn

    def __iter__(self) -> Iterator[Record]:
        if self.first is None:
            return
        if self._begins:
            yield self.first
        for record in self._records if self._begins else chain((self.first,), self._records):
            if self.is_over:
                return
            self.record = record
            event = record.event
            if type(event) in _CHECKED or isinstance(event, ev.Executed) and len(event.token_ids) % 4:
                try:
                    self._check_observation(event)
                except ValueError as error:
                    raise self.contradiction(record, error) from error
            yield record

    def naming(self, record: Record | None = None) -> "_Naming":
        """Return a context manager that handles an error caused by `record` (default: the current record).

        The error becomes the log's last finding if the record is a decision, or if an earlier decision broke
        a rule. In these cases, the `with` block and the iteration end. Otherwise CorruptLog is raised, and
        names the record.
        """
        return _Naming(self, record)

    def _handle(self, error: Exception, record: Record | None) -> bool:
        """Return whether an error became a finding. Raises CorruptLog if an observation caused the error, and
        no earlier decision broke a rule. A malformed column always raises CorruptLog.
        """
        if isinstance(error, LogError):
            return False
        if isinstance(error, _CannotFold):
            self._add(error.broken)
            return True
        lying = record or self.record
        if lying is None:
            return False
        is_sound = type(lying.event) in _OBSERVATIONS and not self._is_doubtful
        if is_sound or isinstance(error, MalformedColumn):
            raise self.contradiction(lying, error) from error
        text = f"the state cannot take the decision: {_described(error)}"
        self._add(BrokenRule(FOLD, text, 0, 0, can_fold=False))
        return True

    def _add(self, broken: BrokenRule) -> None:
        record = self._named or self.record
        assert record is not None  # Only the event of a record can break a rule.
        self._is_doubtful = True
        self.is_over = self.is_over or not broken.can_fold
        where = (record.sequence, record.step, type(record.event).__name__)
        self.findings.add(Finding(*broken[:4], *where, not broken.can_fold))

    @staticmethod
    def contradiction(record: Record, error: Exception) -> CorruptLog:
        return CorruptLog(
            f"record {record.sequence} (step {record.step}, {type(record.event).__name__}) contradicts the "
            f"records before it: {_described(error)}"
        )

    def apply(self, state: State, event: ev.Event) -> None:
        """Check an event, and apply the event to the state. The decisions are not derived again. Must be
        called in a `naming` block. After an error, the state is undefined.
        """
        self.check(state, event)
        evolve(state, event)

    def check(self, state: State, event: ev.Event) -> None:
        """Collect the rules that an event breaks. Must be called in a `naming` block. Raises an error if the
        state cannot take the event.
        """
        for broken in broken_rules(state, event):
            if not broken.can_fold:
                raise _CannotFold(broken)
            self._add(broken)
        check_observation(state, event)

    def _check_observation(self, event: ev.Event) -> None:
        match event:
            case ev.Started():
                raise ValueError("STARTED may only be the first record of a log")
            case ev.Queued(request_id=name):
                if name in self._live:
                    raise ValueError(f"the request id {name!r} belongs to a request that has not ended")
                self._live.add(name)
                check_content(np.frombuffer(event.prompt, np.int32), event.media, self.config)
            case ev.Finished(request_id=name):
                self._live.discard(name)
            case ev.Executed():
                raise ValueError(
                    f"token_ids has {len(event.token_ids)} bytes, which is not a multiple of 4 (int32)"
                )


class _Naming:
    """The context manager of `CheckedLog.naming`. A class is faster than a generator function, and a replay
    enters two `naming` blocks per record.
    """

    __slots__ = ("_log", "_outer", "_record")

    def __init__(self, log: CheckedLog, record: Record | None):
        self._log, self._record = log, record
        self._outer: Record | None = None

    def __enter__(self) -> None:
        self._outer, self._log._named = self._log._named, self._record

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool | None:
        try:
            return isinstance(error, Exception) and self._log._handle(error, self._record)
        finally:
            self._log._named = self._outer


class _CannotFold(Exception):
    """Raised by `check` for a decision that the state cannot take."""

    def __init__(self, broken: BrokenRule):
        super().__init__(broken.text)
        self.broken = broken


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _replay_config(started: ev.Started, folder: Path) -> EngineConfig:
    """Return the settings in the log.

    Raises CorruptLog for an unknown schema, and for settings whose state would not fit into memory.
    """
    if started.schema != ev.SCHEMA_VERSION:
        raise CorruptLog(
            f"STARTED in {folder} has schema {started.schema}; this build reads schema {ev.SCHEMA_VERSION}",
            "version",
        )
    try:
        config = EngineConfig.from_dict(started.config)
        config.check_foldable()
        policy_named(config.policy)
    except ConfigError as error:
        raise CorruptLog(f"STARTED in {folder} contains invalid settings: {error}") from None
    cells = config.num_rows * config.max_model_len * config.num_groups
    if max(cells, config.num_blocks * config.block_size) > MAX_CELLS:
        raise CorruptLog(
            f"STARTED in {folder} has more rows or blocks than a replay can hold: max_num_seqs x "
            f"max_model_len x block groups and num_blocks x block_size may each be at most {MAX_CELLS}"
        )
    if started.decision_version == DECISION_VERSION and started.constants not in _constants(started, config):
        raise CorruptLog(
            f"STARTED in {folder} contradicts itself: its constants do not follow from its settings"
        )
    if started.num_blocks != config.num_blocks:
        raise CorruptLog(
            f"STARTED in {folder} contradicts itself: its num_blocks is {started.num_blocks}, but num_blocks "
            f"in its settings is {config.num_blocks}"
        )
    if started.host and (rules := rules_for(started)).compat:
        return msgspec.structs.replace(config, compat=rules.compat)
    return config


def _constants(started: ev.Started, config: EngineConfig) -> tuple[ev.FoldConstants, ...]:
    """Return the constants that STARTED may have. If another engine recorded the log, the second item has the
    constants that earlier versions of the recorder wrote. They did not set `fills_with_results`, and took
    `media_ahead` and `media_held_ahead` from vLLM's newest version.
    """
    exact = constants_of(config, started.host)
    if not started.host:
        return (exact,)
    exact = msgspec.structs.replace(exact, knows_contents=started.constants.knows_contents)
    newest = constants_of(config)
    older = msgspec.structs.replace(
        exact,
        fills_with_results=False,
        media_ahead=newest.media_ahead,
        media_held_ahead=newest.media_held_ahead,
    )
    return exact, older

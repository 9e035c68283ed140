"""Reads a log that an engine will continue: the state at the log's end, and the undelivered answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mmengine.config import OPERATIONAL, EngineConfig
from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot.body import Body
from mmengine.core.snapshot.snapshot import newest_before, newest_first
from mmengine.core.state.state import State
from mmengine.core.undelivered_answers import NO_RECORD, ResumedAnswer, UndeliveredAnswers, restored
from mmengine.errors import ConfigError, CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, Record
from mmengine.events.recovery import Cut, Mode
from mmengine.events.retention import Undelivered
from mmengine.version import __version__

BEHIND_ALL = 2**64  # higher than any record's sequence number


@dataclass(frozen=True, slots=True)
class Resume:
    """Options for continuing a log.

    `mode`: which kinds of damage are tolerated, as in events/recovery.py. `force`: continue even if the
    weights, the processor, the dtype or the backend have changed. `cause`: the step error that ended the
    previous process, or "". `wanted`: returns whether a delivered answer is needed again. `awaited`: ids of
    session requests whose callers still wait; other session requests do not continue.
    """

    mode: Mode = "tail"
    force: bool = False
    cause: str = ""
    wanted: Callable[[str], bool] | None = None
    awaited: frozenset[str] = frozenset()


@dataclass(slots=True)
class ResumeState:
    """The contents of a log that an engine needs to continue it.

    `answers`: request id -> answer, for requests that are live, undelivered, or wanted again. `steps`: step
    numbers whose results the log lacks. `mode`, `cuts`: how the log was repaired. `fingerprints`: the
    fingerprints in the last RECOVERED event; after a comparison, the current model's fingerprints replace
    them. `undelivered`: the observer that collects `answers`, also while the engine runs.
    """

    started: ev.Started
    state: State
    answers: dict[str, ResumedAnswer]
    steps: tuple[int, ...]
    fingerprints: dict[str, str]
    undelivered: UndeliveredAnswers
    mode: str = "tail"
    cuts: tuple[tuple[str, int, int], ...] = ()

    @property
    def last_fingerprints(self) -> dict[str, str]:
        """The fingerprints of the model that wrote the log's end."""
        return {**self.started.fingerprints, **self.fingerprints}

    def config_for(self, given: EngineConfig) -> EngineConfig:
        """Return the log's settings, updated with the operational settings in `given`.

        Operational settings do not influence scheduling decisions. Raises ConfigError if `given` differs from
        the log in any other setting.
        """
        logged, default = self.state.config, EngineConfig()
        for name in EngineConfig.__struct_fields__:
            value = getattr(given, name)
            if name not in OPERATIONAL and value not in (getattr(default, name), getattr(logged, name)):
                raise ConfigError(
                    f"the log was begun with {name} {getattr(logged, name)}, not {value}; leave that setting "
                    "out, or begin another log"
                )
        return msgspec.structs.replace(logged, **{name: getattr(given, name) for name in OPERATIONAL})

    def tell(self, cuts: list[Cut]) -> None:
        """Add the bytes that a repair cut off or skipped, so that RECOVERED reports them."""
        self.cuts += tuple((cut.path.name, cut.offset, cut.num_bytes) for cut in cuts)

    def recovered(self, lost: tuple[tuple[str, str], ...]) -> ev.Recovered:
        """Return RECOVERED, the event that continues the log. `lost`: (request id, reason) for each request
        that cannot continue.
        """
        return ev.Recovered(self.steps, self.mode, self.cuts, lost, self.fingerprints, __version__)


def read_resume_state(folder: Path, resume: Resume) -> ResumeState:
    """Read the log in `folder`. Reading begins at the newest snapshot that contains all undelivered answers.

    The whole log is read if there is no such snapshot, if the mode is `strict`, or if delivered answers are
    wanted. Raises LogError if there is no log or this build does not know its settings, CorruptLog if the log
    is damaged, and OSError.
    """
    if resume.mode != "strict" and resume.wanted is None:
        before = BEHIND_ALL
        while (base := _newest_known(folder, before)) is not None:
            state, body, undelivered = base
            reader = LogReader(folder, resume.mode, body.sequence + 1)
            if body.sequence + 1 < reader.first_sequence:
                break  # records after the snapshot are missing
            _fold(state, undelivered, _without_gap(iter(reader), body.sequence + 1))
            lacks = [undelivered.undelivered.begins[name] for name in undelivered.lacking]
            if reader.recovery.next_sequence > body.sequence and not lacks:
                cuts = reader.recovery.cuts
                return _resumed(body.started, state, undelivered, undelivered.fingerprints, resume, cuts)
            before = min([*lacks, body.sequence])
    return _read_whole(folder, resume)


def _newest_known(folder: Path, before: int) -> tuple[State, Body, UndeliveredAnswers] | None:
    """Return the newest snapshot before record `before` that contains undelivered answers, or None."""
    for state, body in newest_first(folder, before):
        if (undelivered := restored(state, body)) is not None:
            return state, body, undelivered
    return None


def _read_whole(folder: Path, resume: Resume) -> ResumeState:
    survey = _survey(folder, resume)
    base = newest_before(folder, min(survey.undelivered.oldest, survey.last + 1))
    if base is None:
        records = iter(LogReader(folder, resume.mode))
        first = next(records, None)
        if first is None:
            raise CorruptLog(f"{folder} has no record yet, not even STARTED")
        if not isinstance(first.event, ev.Started):
            raise CorruptLog(f"{folder} does not begin with STARTED, and no snapshot there can be used")
        started, state = first.event, State(_config_of(first.event, folder))
        evolve(state, started)
    else:
        state, body = base
        started, records = body.started, iter(LogReader(folder, resume.mode, body.sequence + 1))
    undelivered = UndeliveredAnswers(state, 0 if base is None else body.sequence)
    _fold(state, undelivered, _without_gap(records, 1 if base is None else body.sequence + 1), resume.wanted)
    return _resumed(started, state, undelivered, survey.fingerprints, resume, survey.cuts)


def _config_of(started: ev.Started, folder: Path) -> EngineConfig:
    try:
        return EngineConfig.from_dict(started.config)
    except ConfigError as error:
        raise LogError(
            f"the log in {folder} was begun by mmengine {started.engine_version}, with settings that this "
            f"build, {__version__}, does not support: {error}"
        ) from None


def _resumed(
    started: ev.Started,
    state: State,
    undelivered: UndeliveredAnswers,
    fingerprints: dict[str, str],
    resume: Resume,
    cuts: list[Cut],
) -> ResumeState:
    steps = [flight.step for flight in state.flights] + ([state.step] if state.is_open else [])
    undelivered.fingerprints = fingerprints
    answers = undelivered.answers()
    resumed = ResumeState(started, state, answers, tuple(steps), fingerprints, undelivered, resume.mode)
    resumed.tell(cuts)
    return resumed


@dataclass(slots=True)
class _Survey:
    """The result of a first pass over a log.

    `undelivered`: requests whose answers are needed. `last`: the last record's number. `fingerprints`:
    the fingerprints in the last RECOVERED. `cuts`: damaged bytes that were skipped.
    """

    undelivered: Undelivered = field(default_factory=Undelivered)
    last: int = NO_RECORD
    fingerprints: dict[str, str] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)


def _survey(folder: Path, resume: Resume) -> _Survey:
    survey, wanted = _Survey(), resume.wanted
    reader = LogReader(folder, resume.mode)
    for record in reader:
        survey.last = record.sequence
        match record.event:
            case ev.Delivered() as delivered if _is_wanted(delivered, wanted):
                pass
            case ev.Queued() | ev.Finished() | ev.Delivered():
                survey.undelivered.see(record.event, record.sequence)
            case ev.Recovered(fingerprints=fingerprints):
                survey.fingerprints = fingerprints
    survey.cuts = reader.recovery.cuts
    return survey


def _is_wanted(delivered: ev.Delivered, wanted: Callable[[str], bool] | None) -> bool:
    return wanted is not None and wanted(delivered.request_id)


def _without_gap(records: Iterator[Record], expected: int) -> Iterator[Record]:
    """Yield `records`. Raises CorruptLog if the first record is not number `expected` or if there is a gap,
    because a missing record's effect is unknown.
    """
    for record in records:
        if record.sequence != expected:
            raise CorruptLog(
                f"records {expected} to {record.sequence - 1} are lost, and a request that still needs its "
                "answer began before a later snapshot; begin another log"
            )
        expected += 1
        yield record


def _fold(
    state: State,
    undelivered: UndeliveredAnswers,
    records: Iterator[Record],
    wanted: Callable[[str], bool] | None = None,
) -> None:
    """Apply the records to the state. For `wanted` requests, `undelivered` ignores DELIVERED, so that their
    answers are delivered again.
    """
    for record in records:
        event = record.event
        try:
            if isinstance(event, ev.Delivered) and _is_wanted(event, wanted):
                evolve(state, event)
                undelivered.sequence = record.sequence
            else:
                undelivered.fold(event)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            raise CorruptLog(
                f"record {record.sequence} (step {record.step}, {type(event).__name__}) cannot follow "
                f"the records before it: {type(error).__name__}: {error}"
            ) from error

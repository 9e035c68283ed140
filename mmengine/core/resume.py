"""What a log says of the process that wrote it: the state in which it ended, and the answers that
nobody received yet."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mmengine.config import OPERATIONAL, EngineConfig
from mmengine.core.executed import prompt_logprobs
from mmengine.core.executor import PromptLogprobs
from mmengine.core.fold.evolve import evolve
from mmengine.core.outputs import Output
from mmengine.core.snapshot.snapshot import newest_before
from mmengine.core.state.request_state import NO_ROW, RequestState
from mmengine.core.state.state import State
from mmengine.errors import ConfigError, CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, Record
from mmengine.events.recovery import Cut, Mode
from mmengine.version import __version__

NO_RECORD = -1  # in place of a sequence


@dataclass(frozen=True, slots=True)
class Resume:
    """How to continue a log, where there is one. `mode`: what damage is forgiven, as in events/recovery.
    `force`: also with other weights, processor, dtype or backend. `cause`: how the process before ended,
    where that was the doing of a step. `wanted`: requests whose answers are
    needed though they were delivered."""

    mode: Mode = "tail"
    force: bool = False
    cause: str = ""
    wanted: Callable[[str], bool] = lambda request_id: False


@dataclass(slots=True)
class ResumedAnswer:
    """One request, and what it has of its answer. `reason` is empty while it is live."""

    queued: ev.Queued
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[tuple[int, float], ...]] | None = None
    reason: str = ""
    detail: str = ""
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    def add(self, output: Output) -> None:
        """What another step gave the request."""
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        if output.finish_reason is not None:
            self.reason, self.detail = output.finish_reason, output.detail
            self.num_cached_tokens = output.num_cached_tokens

    @property
    def was_given_up(self) -> bool:
        """Whether the request was cancelled, so that its answer is none. A deadline that passed is one."""
        return self.reason == "abort" and self.detail != "deadline"


@dataclass(slots=True)
class ResumeState:
    """`answers`: of requests that are live, or ended and were not delivered (or are wanted again), by id.
    `steps`: numbers of those that were open or in flight at the end. `mode` and `cuts`: how the log was
    repaired. `fingerprints`: of the model that went on with it last, or goes on now."""

    started: ev.Started
    state: State
    answers: dict[str, ResumedAnswer]
    steps: tuple[int, ...]
    fingerprints: dict[str, str]
    mode: str = "tail"
    cuts: tuple[tuple[str, int, int], ...] = ()

    def config_for(self, given: EngineConfig) -> EngineConfig:
        """The log's settings, with those of `given` that no decision depends on. Raises ConfigError for
        one that was given and differs."""
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
        """What of the log does not count, for RECOVERED."""
        self.cuts += tuple((cut.path.name, cut.offset, cut.num_bytes) for cut in cuts)

    def recovered(self, lost: tuple[tuple[str, str], ...]) -> ev.Recovered:
        """The event that goes on from here; `lost`: requests that cannot go on, and why."""
        return ev.Recovered(self.steps, self.mode, self.cuts, lost, self.fingerprints, __version__)


def read_resume_state(folder: Path, resume: Resume) -> ResumeState:
    """Fold the log in `folder`. Raises LogError when there is none, CorruptLog when it is damaged."""
    survey = _survey(folder, resume)
    base = newest_before(folder, min(survey.begins.values(), default=survey.last + 1))
    if base is None:
        records = iter(LogReader(folder, resume.mode))
        first = next(records)
        if not isinstance(first.event, ev.Started):
            raise CorruptLog(f"{folder} does not begin with STARTED, and no snapshot there can be used")
        started, state = first.event, State(EngineConfig.from_dict(first.event.config))
        evolve(state, started)
    else:
        state, body = base
        started, records = body.started, iter(LogReader(folder, resume.mode, body.sequence + 1))
    answers = _fold(state, _without_gap(records, 1 if base is None else body.sequence + 1), survey.begins)
    for name, req_state in state.requests.items():
        if name not in answers:
            raise CorruptLog(f"the record of how request {name!r} began is lost; begin another log")
        answer = answers[name]
        answer.token_ids, answer.num_cached_tokens = _tokens(state, req_state), max(0, req_state.num_cached)
    steps = [flight.step for flight in state.flights] + ([state.step] if state.is_open else [])
    resumed = ResumeState(started, state, answers, tuple(steps), survey.fingerprints, resume.mode)
    resumed.tell(survey.cuts)
    return resumed


@dataclass(slots=True)
class _Survey:
    """`begins`: sequences of the QUEUED of requests whose answers are needed, by id. `last`: sequence of
    the last record. `fingerprints`: of the last RECOVERED. `cuts`: what was skipped as damaged."""

    begins: dict[str, int] = field(default_factory=dict)
    last: int = NO_RECORD
    fingerprints: dict[str, str] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)


def _survey(folder: Path, resume: Resume) -> _Survey:
    survey = _Survey()
    begins, ended = survey.begins, set()
    reader = LogReader(folder, resume.mode)
    for record in reader:
        survey.last = record.sequence
        match record.event:
            case ev.Queued(request_id=name):
                begins[name] = record.sequence
                ended.discard(name)
            case ev.Finished(request_id=name):
                ended.add(name)
            case ev.Delivered(request_id=name) if name in ended and not resume.wanted(name):
                begins.pop(name, None)
                ended.discard(name)
            case ev.Recovered(fingerprints=fingerprints):
                survey.fingerprints = fingerprints
    survey.cuts = reader.recovery.cuts
    return survey


def _without_gap(records: Iterator[Record], expected: int) -> Iterator[Record]:
    """`records`, which begin with `expected`; nobody knows what those did that were skipped as damaged."""
    for record in records:
        if record.sequence != expected:
            raise CorruptLog(
                f"records {expected} to {record.sequence - 1} are lost, and a request that still needs its "
                "answer began before a snapshot that stands behind them; begin another log"
            )
        expected += 1
        yield record


def _fold(state: State, records: Iterator[Record], begins: dict[str, int]) -> dict[str, ResumedAnswer]:
    answers: dict[str, ResumedAnswer] = {}
    for record in records:
        event = record.event
        try:
            match event:
                case ev.Queued(request_id=name) if begins.get(name) == record.sequence:
                    answers[name] = ResumedAnswer(event)
                case ev.Finished(request_id=name) if name in answers and name in state.requests:
                    _end(state, answers[name], event)
                case ev.Executed(logprobs=logprobs, prompt_logprobs=of_prompts) if logprobs or of_prompts:
                    _take_logprobs(state, event, answers)
                    continue
            evolve(state, event)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            raise CorruptLog(
                f"record {record.sequence} (step {record.step}, {type(event).__name__}) cannot follow what "
                f"the log says before it: {type(error).__name__}: {error}"
            ) from error
    return answers


def _end(state: State, answer: ResumedAnswer, event: ev.Finished) -> None:
    req_state = state.requests[event.request_id]
    answer.token_ids, answer.num_cached_tokens = _tokens(state, req_state), max(0, req_state.num_cached)
    answer.reason, answer.detail = event.reason, event.detail


def _tokens(state: State, req_state: RequestState) -> list[int]:
    tokens = req_state.tokens
    if req_state.row != NO_ROW:
        tokens = state.token_ids[req_state.row, : state.num_tokens[req_state.row]]
    return tokens[req_state.num_prompt :].tolist()


def _take_logprobs(state: State, event: ev.Executed, answers: dict[str, ResumedAnswer]) -> None:
    """Apply EXECUTED, and keep the logprobs of those that took their token."""
    sampled = state.sampled_rows()
    before, owners = state.num_tokens[sampled], state.requests_by_row[sampled]
    evolve(state, event)
    took = (state.num_tokens[sampled] - before).tolist()
    for found in prompt_logprobs(event):
        req_state = owners[found.row]
        answer = None if req_state is None else answers.get(req_state.request.request_id)
        if answer is not None and took[found.row]:
            answer.prompt_logprobs = found
    for index, entries in event.logprobs:
        req_state = owners[index]
        answer = answers.get(req_state.request.request_id) if req_state is not None and took[index] else None
        if answer is not None:
            took[index] -= 1
            answer.logprobs = answer.logprobs or []
            answer.logprobs.append(entries)

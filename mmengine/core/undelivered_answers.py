"""Collects, from the log's events, all answers that no consumer has received completely.

An engine that continues a log collects the answers while it reads the log and while it runs. Snapshots
contain the answers, so a process that continues from a snapshot needs no earlier record.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from mmengine.core.choice_orders import ChoiceOrders
from mmengine.core.executor import PromptLogprobs
from mmengine.core.fold.evolve import evolve
from mmengine.core.observer import Observer
from mmengine.core.outputs import Output
from mmengine.core.snapshot import body as saved
from mmengine.core.snapshot.snapshot import digest_of
from mmengine.core.state.request_state import NO_ROW, RequestState, queued_of, request_of
from mmengine.core.state.state import State
from mmengine.core.step_result import pooled_vectors, prompt_logprobs
from mmengine.errors import CorruptLog, ErrorCode
from mmengine.events import vocabulary as ev
from mmengine.events.retention import Undelivered
from mmengine.request import Request

# Maximum number of logprobs in a snapshot, including prompt logprobs. With this limit, writing takes at most
# a few ms.
MAX_SCORES = 2**17
Logprobs = list[tuple[tuple[int, float], ...]]

NO_RECORD = -1  # a sequence number before the first record

_decoder = msgspec.msgpack.Decoder(saved.SavedAnswers)
_NO_ROWS = np.zeros(0, np.intp)


@dataclass(slots=True)
class ResumedAnswer:
    """A request and its answer so far, as the log contains them. `reason` is empty while the request runs or
    waits.
    """

    queued: ev.Queued
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    reason: str = ""
    detail: str = ""
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    code: ErrorCode | None = None
    vector: np.ndarray | None = None  # the vector of a pooled request, if the log contains it
    order: bytes = b""  # only for the first of several choices: the token order (core/choice_orders.py)

    def add(self, output: Output) -> None:
        """Append the output of the request's next step."""
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.vector = output.vector if output.vector is not None else self.vector
        if output.finish_reason is not None:
            self.reason, self.detail, self.code = output.finish_reason, output.detail, output.code
            self.num_cached_tokens = output.num_cached_tokens

    @property
    def is_gone(self) -> bool:
        """Whether no consumer can get the answer, because the request was cancelled or the log has only a
        digest of its vector.
        """
        return self.was_given_up or (self.reason == "pooled" and self.vector is None)

    @property
    def was_given_up(self) -> bool:
        """Whether the consumer cancelled the request. A passed deadline is no cancellation."""
        return self.code is ErrorCode.CANCELLED


@dataclass(slots=True)
class _Scores:
    """The logprobs for an answer's tokens and for its prompt. For a pooled request: the vector."""

    logprobs: Logprobs | None = None
    of_prompt: PromptLogprobs | None = None
    vector: np.ndarray | None = None  # float32 [d], only for a pooled request

    def __len__(self) -> int:
        """Return the number of logprobs and vector values."""
        return sum(map(len, self.logprobs or ())) + (
            (0 if self.of_prompt is None else self.of_prompt.logprobs.size)
            + (0 if self.vector is None else self.vector.size)
        )


@dataclass(frozen=True, slots=True)
class _Ended:
    """An ended request and its answer."""

    request: Request
    token_ids: np.ndarray  # int32
    reason: str
    detail: str
    num_cached: int
    scores: _Scores
    code: ErrorCode | None = None


class UndeliveredAnswers(Observer):
    """One log's undelivered answers.

    `sequence`: the last applied record's number. `undelivered`: the requests whose answers a consumer still
    needs. `lacking`: requests whose first logprobs a snapshot omitted. `fingerprints`: the model's
    fingerprints in the last RECOVERED event.
    """

    def __init__(self, state: State, sequence: int = NO_RECORD) -> None:
        self._state, self.sequence = state, sequence
        self.undelivered = Undelivered()
        self.lacking: set[str] = set()
        self.fingerprints: dict[str, str] = {}
        self._ended: dict[str, _Ended] = {}
        self._orders = ChoiceOrders(state.config.max_num_seqs)
        self._scores: dict[str, _Scores] = {}  # request id -> logprobs, for live requests with logprobs
        # For a step with logprobs or several choices: the rows that sampled (intp), their numbers of tokens
        # before the step, and their requests.
        self._sampled = _NO_ROWS
        self._num_tokens, self._owners = _NO_ROWS, _NO_ROWS

    def before(self, event: ev.Event) -> None:
        """Process the next record's event, before the event is applied to the state."""
        self.sequence += 1
        match event:
            case ev.Executed(logprobs=logprobs, prompt_logprobs=of_prompts):
                if logprobs or of_prompts or self._orders:
                    self._sampled = self._state.sampled_rows()
                    self._num_tokens = self._state.num_tokens[self._sampled]
                    self._owners = self._state.requests_by_row[self._sampled]
            case ev.Admitted(request_id=name, row=row):
                self._orders.admit(name, row)
            case ev.Queued(request_id=name, group=group):
                self._forget(name)
                if (first := self._state.requests.get(group)) and not first.request.group:
                    self._orders.begin(name, group, first.row)
                self.undelivered.see(event, self.sequence)
            case ev.Finished(request_id=name):
                req_state = self._state.requests.get(name)
                if req_state is not None and name in self.undelivered.begins:
                    scores = self._scores.pop(name, _Scores())
                    self._ended[name] = _ended(self._state, req_state, event, scores)
                    self.undelivered.see(event, self.sequence)
            case ev.Delivered(request_id=name):
                if name in self.undelivered.ended:
                    self._forget(name)
                    self.undelivered.see(event, self.sequence)
            case ev.Recovered(fingerprints=fingerprints):
                self.fingerprints = fingerprints

    def after(self, event: ev.Event) -> None:
        """Store the event's logprobs and pooled vectors, and the token order of choices."""
        if not isinstance(event, ev.Executed):
            return
        for vector in pooled_vectors(event):
            scores = self._scores_of(self._state.requests_by_row[vector.row])
            if scores is not None and len(vector.vector):
                scores.vector = vector.vector
        if not len(self._owners):
            return
        counts = self._state.num_tokens[self._sampled] - self._num_tokens
        self._orders.sample(self._sampled, counts)
        took = counts.tolist() if event.logprobs or event.prompt_logprobs else []
        for found in prompt_logprobs(event):
            if took[found.row] and (scores := self._scores_of(self._owners[found.row])) is not None:
                scores.of_prompt = found
        for index, entries in event.logprobs:
            if took[index] and (scores := self._scores_of(self._owners[index])) is not None:
                took[index] -= 1
                scores.logprobs = scores.logprobs or []
                scores.logprobs.append(entries)
        self._owners = _NO_ROWS

    def fold(self, event: ev.Event) -> None:
        """Apply the next record's event to the state and to these answers."""
        self.before(event)
        evolve(self._state, event)
        self.after(event)

    def _forget(self, name: str) -> None:
        if (ended := self._ended.pop(name, None)) is not None:
            self._orders.forget(name, ended.request.group)
        self.lacking.discard(name)

    def _scores_of(self, req_state: RequestState | None) -> _Scores | None:
        name = "" if req_state is None else req_state.request.request_id
        return self._scores.setdefault(name, _Scores()) if name in self.undelivered.begins else None

    def answers(self) -> dict[str, ResumedAnswer]:
        """Return request id -> answer, in the order in which the requests began.

        Raises CorruptLog if the log lacks a live request's QUEUED event.
        """
        begins, state = self.undelivered.begins, self._state
        for name in state.requests:
            if name not in begins or name in self._ended:
                raise CorruptLog(f"the record of how request {name!r} began is lost; begin another log")
        answers, orders = {}, self._orders.orders()
        for name in begins:
            ended = self._ended.get(name)
            if ended is None:
                req_state, scores = state.requests[name], self._scores.get(name, _Scores())
                ended = _Ended(
                    req_state.request, _tokens(state, req_state), "", "", max(0, req_state.num_cached), scores
                )
            logprobs = ended.scores.logprobs
            answers[name] = ResumedAnswer(
                queued_of(ended.request),
                ended.token_ids.tolist(),
                None if logprobs is None else list(logprobs),
                ended.reason,
                ended.detail,
                ended.num_cached,
                ended.scores.of_prompt,
                ended.code,
                ended.scores.vector,
                orders.get(name, b""),
            )
        return answers

    def saved(self) -> saved.SavedAnswers:
        """Return the answers as structs for a snapshot. `restored` reads these structs."""
        state = self._state
        left, lacking = MAX_SCORES, set(self.lacking)
        scores = {name: ended.scores for name, ended in self._ended.items()} | self._scores
        for name, one in scores.items():
            left -= len(one)
            if left < 0 and len(one):
                lacking.add(name)
        kept = {name: _saved_scores(one) for name, one in scores.items() if name not in lacking}
        nothing, named = saved.Scores(), state.grammar_slots.named
        answers = tuple(
            saved.Answer(
                named(queued_of(one.request)),
                one.token_ids.tobytes(),
                one.reason,
                one.detail,
                one.num_cached,
                kept.get(name, nothing),
                one.code,
            )
            for name, one in self._ended.items()
        )
        live = tuple((name, one) for name, one in kept.items() if name not in self._ended)
        begins = tuple(self.undelivered.begins.items())
        orders = self._orders.saved()
        return saved.SavedAnswers(begins, answers, live, tuple(lacking), self.fingerprints, orders)


def restored(state: State, body: saved.Body) -> UndeliveredAnswers | None:
    """Return the answers from a snapshot of `state`, or None if the snapshot contains no valid answers."""
    if not body.answers or digest_of(body.answers) != body.answers_digest:
        return None
    try:
        found = _decoder.decode(body.answers)
        return _filled(state, found, body.sequence)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _filled(state: State, found: saved.SavedAnswers, sequence: int) -> UndeliveredAnswers:
    """Return the restored answers. Raises ValueError if the answers contradict the state."""
    out = UndeliveredAnswers(state, sequence)
    for one in found.answers:
        request = request_of(state.grammar_slots.whole(one.queued))
        token_ids = np.frombuffer(one.token_ids, np.int32)
        scores = _filled_scores(one.scores)
        out._ended[request.request_id] = _Ended(
            request, token_ids, one.reason, one.detail, one.num_cached, scores, one.code
        )
    out._scores.update((name, _filled_scores(scores)) for name, scores in found.scores)
    out.undelivered = Undelivered(dict(found.begins), out._ended)
    out.lacking, out.fingerprints = set(found.lacking), found.fingerprints
    rows = {name: one.row for name, one in state.requests.items() if one.row != NO_ROW}
    out._orders.restore(found.orders, rows.items())
    live, ended = set(state.requests), set(out._ended)
    if live & ended or live | ended != set(out.undelivered.begins) or not set(out._scores) <= live:
        raise ValueError("its requests are not those in the state")
    return out


def _ended(state: State, req_state: RequestState, event: ev.Finished, scores: _Scores) -> _Ended:
    tokens, num_cached = _tokens(state, req_state), max(0, req_state.num_cached)
    return _Ended(req_state.request, tokens, event.reason, event.detail, num_cached, scores, event.code)


def _tokens(state: State, req_state: RequestState) -> np.ndarray:
    return state.known_tokens(req_state)[req_state.num_prompt :].copy()


def _saved_scores(scores: _Scores) -> saved.Scores:
    found = scores.of_prompt
    of_prompt = None
    if found is not None:
        width = found.token_ids.shape[1]
        of_prompt = width, found.token_ids.tobytes(), found.logprobs.tobytes()
    logprobs = None if scores.logprobs is None else tuple(scores.logprobs)
    vector = b"" if scores.vector is None else scores.vector.astype(np.float32).tobytes()
    return saved.Scores(logprobs, of_prompt, vector)


def _filled_scores(found: saved.Scores) -> _Scores:
    of_prompt = None
    if found.of_prompt is not None:
        width, token_ids, logprobs = found.of_prompt
        ids = np.frombuffer(token_ids, np.int32).reshape(-1, width)
        of_prompt = PromptLogprobs(0, ids, np.frombuffer(logprobs, np.float32).reshape(ids.shape))
    vector = np.frombuffer(found.vector, np.float32) if found.vector else None
    return _Scores(None if found.logprobs is None else list(found.logprobs), of_prompt, vector)

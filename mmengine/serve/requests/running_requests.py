"""Tracks running requests, and converts the core's outputs to outputs for callers.

In the core, each choice is a separate request. Its id is called the core id.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from mmengine.core.engine import EngineCore
from mmengine.core.executor import PromptLogprobs
from mmengine.core.outputs import Output
from mmengine.core.state.request_state import NO_ROW
from mmengine.core.undelivered_answers import ResumedAnswer
from mmengine.events.vocabulary import Queued
from mmengine.models.plugin import Prepared, Tokenizer
from mmengine.request import GrammarRequest, Request
from mmengine.serve.prompt.prompt import core_ids
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.text.choice_order import in_order
from mmengine.serve.text.detokenizer import Stops, TextStream
from mmengine.serve.text.output_text import with_texts
from mmengine.serve.text.request_output import Choice, Completion, Logprobs, RequestOutput, finish_detail
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.token_confidence import split_entries


@dataclass(slots=True)
class _Answer:
    """A choice that is being generated."""

    index: int
    stream: TextStream | None
    stops: Stops
    grammar: GrammarRequest | None
    after: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None  # may also contain confidences (token_confidence.py)


@dataclass(slots=True)
class _Pending:
    """A request whose choices have not all ended."""

    request_id: str
    prepared: Prepared
    waiting_for: int
    notes: tuple[Note, ...] = ()
    choices: dict[int, Choice] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    prompt_scores: PromptLogprobs | None = None
    vector: np.ndarray | None = None


class RunningRequests:
    """An engine's running requests.

    `resumed` maps core ids to answers from the previous process, until a caller resumes them. `notes_on`
    returns remarks for the caller on a grammar. With `texts` False, outputs have tokens but no text.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        resumed: dict[str, ResumedAnswer],
        notes_on: Callable[[GrammarRequest], tuple[Note, ...]],
        texts: bool = True,
    ):
        self._core, self._tokenizer, self._texts = core, tokenizer, texts
        self._notes_on = notes_on
        self.resumed = resumed
        self._pending: dict[str, _Pending] = {}
        self._answers: dict[str, tuple[_Pending, _Answer]] = {}
        self._undelivered: dict[str, list[str]] = {}  # core ids of ended answers by request id

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    @property
    def has_streams(self) -> bool:
        """Whether a running request was submitted with `stream`."""
        return any(answer.stream is not None for _, answer in self._answers.values())

    def core_ids(self, request_id: str) -> Iterator[str]:
        """Yield the core ids of a request's running choices."""
        for core_id, (pending, _) in list(self._answers.items()):
            if pending.request_id == request_id:
                yield core_id

    def prepared(self, request_id: str) -> Prepared:
        """Return a running request's prepared prompt."""
        return self._pending[request_id].prepared

    def prompt_tokens(self, request_id: str) -> tuple[int, int]:
        """Return (computed prompt tokens, all prompt tokens), summed over the running choices."""
        state, computed, whole = self._core.view, 0, 0
        for req_state in map(state.requests.get, self.core_ids(request_id)):
            if req_state is not None:
                whole += req_state.num_prompt
            if req_state is not None and req_state.row != NO_ROW:
                there = state.num_computed[req_state.row] - state.scheduled[req_state.row]
                computed += min(int(there), req_state.num_prompt)
        return computed, whole

    def encoded_percent(self, request_id: str) -> int | None:
        """Return the percentage of the request's large media item that is encoded, or None.

        Large items are encoded over several steps. None: no large item of the request is being encoded.
        """
        state = self._core.view
        part = state.part
        if part is None or part.request_id not in self.core_ids(request_id):
            return None
        return 100 * part.until // state.requests[part.request_id].media_work[part.item]

    def begin(
        self,
        request_id: str,
        prepared: Prepared,
        requests: list[Request],
        stream: bool,
        notes: tuple[Note, ...] = (),
    ) -> None:
        """Add a request that the core has accepted. `requests`: the core request for each choice.

        `notes`: remarks for the caller on the response format.
        """
        pending = _Pending(request_id, prepared, len(requests), notes)
        self._pending[request_id] = pending
        for request in requests:
            answer = self._new_answer(request, stream)
            answer.token_ids = request.outputs.tolist()
            if answer.stream is not None:
                answer.stream.push(answer.token_ids)
            self._answers[request.request_id] = pending, answer

    def _new_answer(self, request: Request | Queued, stream: bool) -> _Answer:
        stops = Stops.of(request.sampling, request.grammar)
        text = stops.stream(self._tokenizer) if stream and self._texts else None
        return _Answer(request.sample_index, text, stops, request.grammar, stops.after)

    def take(self, output: Output) -> RequestOutput | None:
        """Convert a core output for the request's caller. Returns None if the request has no caller."""
        if output.request_id not in self._answers:
            self._take_unclaimed(output)
            return None
        pending, answer = self._answers[output.request_id]
        answer.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + list(output.logprobs)
        pending.num_cached_tokens = max(pending.num_cached_tokens, output.num_cached_tokens)
        pending.prompt_scores = output.prompt_logprobs or pending.prompt_scores
        pending.vector = output.vector if output.vector is not None else pending.vector
        pending.num_drafts += output.num_drafts
        pending.num_accepted += output.num_accepted
        text = answer.stream.push(output.token_ids) if answer.stream is not None else ""
        logprobs, confidences = split_entries(output.logprobs)
        if output.finish_reason is None:
            return RequestOutput(
                pending.request_id,
                answer.index,
                text,
                output.token_ids,
                after=answer.after,
                logprobs=logprobs,
                prompt_scores=output.prompt_logprobs,
                confidences=confidences,
            )
        if answer.stream is not None:
            text += answer.stream.finish()
        completion = self._finish(output, output.finish_reason, pending, answer)
        fields = pending.request_id, answer.index, text, output.token_ids, output.finish_reason, completion
        return RequestOutput(
            *fields, answer.after, logprobs, output.detail, output.prompt_logprobs, output.code, confidences
        )

    def _take_unclaimed(self, output: Output) -> None:
        """Record an output for a recovered or detached request, which has no caller."""
        if output.request_id in self.resumed:
            self.resumed[output.request_id].add(output)
        elif output.finish_reason is not None:
            self._core.delivered(output.request_id)

    def _finish(self, output: Output, reason: str, pending: _Pending, answer: _Answer) -> Completion | None:
        if reason in ("error", "rejected"):
            operator_log.warning("request failed", request_id=output.request_id, reason=output.detail)
        self._undelivered.setdefault(pending.request_id, []).append(output.request_id)
        del self._answers[output.request_id]
        detail = finish_detail(reason, output.detail, has_form=answer.grammar is not None)
        logprobs, confidences = split_entries(answer.logprobs)
        choice = Choice(
            answer.index,
            "",
            answer.token_ids,
            reason,
            detail,
            logprobs,
            answer.after,
            code=output.code,
            confidences=confidences,
        )
        if self._texts:
            choice = with_texts(choice, self._tokenizer, answer.stops, answer.grammar)
        pending.choices[answer.index] = choice
        if len(pending.choices) < pending.waiting_for:
            return None
        del self._pending[pending.request_id]
        return Completion(
            pending.request_id,
            pending.prepared.prompt_token_ids,
            [pending.choices[index] for index in sorted(pending.choices)],
            pending.num_cached_tokens,
            pending.num_drafts,
            pending.num_accepted,
            pending.notes,
            pending.prompt_scores,
            pending.vector,
        )

    def delivered(self, request_id: str) -> None:
        """Record in the log, with the next step, that an answer was delivered.

        A process that resumes the log returns all answers that are not recorded as delivered.
        """
        for core_id in self._undelivered.pop(request_id, ()):
            self._core.delivered(core_id)

    def all_delivered(self) -> None:
        for request_id in list(self._undelivered):
            self.delivered(request_id)

    # Requests from the previous process

    def can_resume(self, request_id: str, num_choices: int = 1) -> bool:
        """Return whether a caller can resume all `num_choices` choices. The log must contain all choices and,
        for a pooled request, the vector. No choice may be cancelled.
        """
        names = core_ids(request_id, num_choices) if self.resumed else [""]
        found = [self.resumed.get(name) for name in names]
        return all(one is not None and not one.is_gone for one in found)

    def resume_with_outputs(self, request_id: str, num_choices: int = 1) -> list[RequestOutput]:
        """Resume a request and return all its outputs so far, in their original order.

        If the answer is complete, the last output has the completion. Raises KeyError if `can_resume` is
        False.
        """
        found = [self.resumed[name] for name in core_ids(request_id, num_choices)]
        completion = self.resume(request_id, num_choices)
        outputs = [_output_of(request_id, one) for one in found]
        if completion is not None:
            outputs[-1] = msgspec.structs.replace(outputs[-1], completion=completion)
        pieces = in_order(outputs, found[0].order)
        return [one for one in pieces if one.token_ids or one.finish_reason is not None]

    def resume(
        self,
        request_id: str,
        num_choices: int = 1,
        *,
        stream: bool = False,
        notes: tuple[Note, ...] = (),
    ) -> Completion | None:
        """Continue a request from the previous process. `notes`: remarks for the caller on the response
        format.

        Returns the completion if the answer is complete. Otherwise `Engine.step` returns further outputs,
        with text if `stream` is set. Raises KeyError if `can_resume` is False.
        """
        names = core_ids(request_id, num_choices)
        found = [self.resumed.pop(name) for name in names]
        first, completion = found[0].queued, None
        prepared = Prepared(np.frombuffer(first.prompt, np.int32), (), "")
        if first.grammar is not None:
            notes += self._notes_on(first.grammar)
        pending = self._pending[request_id] = _Pending(request_id, prepared, num_choices, notes)
        for name, one in zip(names, found, strict=True):
            answer = self._new_answer(one.queued, stream)
            answer.token_ids, answer.logprobs = one.token_ids, one.logprobs
            pending.prompt_scores = one.prompt_logprobs or pending.prompt_scores
            pending.vector = one.vector
            if answer.stream is not None:
                answer.stream.push(one.token_ids)
            self._answers[name] = pending, answer
            if one.reason:
                ended = Output(name, [], one.reason, one.detail, one.num_cached_tokens, code=one.code)
                pending.num_cached_tokens = max(pending.num_cached_tokens, one.num_cached_tokens)
                completion = self._finish(ended, one.reason, pending, answer)
        return completion

    def detach(self, core_id: str) -> None:
        """Let a request from the previous process finish without a caller. An unknown id is no error."""
        one = self.resumed.pop(core_id, None)
        if one is not None and one.reason:
            self._core.delivered(core_id)

    def drop_resumed(self, request_id: str, num_choices: int = 1) -> None:
        """Drop the answers to a request from the previous process, and cancel unfinished choices.

        An unknown id is no error.
        """
        for name in core_ids(request_id, num_choices):
            if (one := self.resumed.pop(name, None)) is None:
                continue
            if one.reason:
                self._core.delivered(name)
            else:
                self._core.cancel(name, "its answer was delivered before")


def _output_of(request_id: str, resumed: ResumedAnswer) -> RequestOutput:
    """Return a resumed choice's whole output so far, without text."""
    logprobs, confidences = split_entries(resumed.logprobs)
    return RequestOutput(
        request_id,
        resumed.queued.sample_index,
        "",
        list(resumed.token_ids),
        resumed.reason or None,
        after=Stops.of(resumed.queued.sampling, resumed.queued.grammar).after,
        logprobs=logprobs,
        detail=resumed.detail,
        code=resumed.code,
        prompt_scores=resumed.prompt_logprobs,
        confidences=confidences,
    )

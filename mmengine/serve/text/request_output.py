"""Defines the outputs and completions that the engine returns to callers."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mmengine.core.executor import CUT as CUT_BY_STRING
from mmengine.core.executor import REPETITION, REPETITION_CLOSED, PromptLogprobs
from mmengine.errors import PROMPTS, ErrorCode, ExecutorFailed, MMEngineError, QueueFull, RequestFailed
from mmengine.structured_output.field_confidence.fields import FieldConfidence
from mmengine.structured_output.grammar_start import find_end
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.token_confidence import TokenConfidence

_ENDS: dict[ErrorCode | None, str] = {
    ErrorCode.DEADLINE_EXCEEDED: "the deadline passed before the answer was complete",
    ErrorCode.CANCELLED: "the request was cancelled",
}
CUT = "the answer was cut at max_tokens, or at the model's maximum length, so it does not match its format"
CUT_AT_STOP = "a stop string cut the answer, so it does not match its format"
REPEATED = "the answer repeated itself, so it does not match its format"
CLOSED = "closed"  # `detail` of an answer whose JSON value was completed within the token budget
PIECE = 64  # maximum number of tokens in an output from `split_output`
Logprobs = list[tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice: an answer among the `n` answers to a prompt.

    `text` ends before a stop string, but `token_ids` has all sampled tokens. finish_reason is stop, length,
    repetition, abort, error or rejected. `detail` explains the reason. For example, `detail` is CUT or
    CUT_AT_STOP if an answer with a response format ends with "length". CLOSED means that the engine completed
    the answer's JSON value. `logprobs` has (token id, logprob) pairs for each token: first the sampled
    token's pair, then the most likely tokens' pairs.

    If field_confidence is requested, `confidences` has an entry for each token that this engine sampled.
    These are the answer's last tokens. `field_confidence` then has the fields' confidences by JSON pointer.

    If the grammar begins after reasoning, `after` has the tokens that end the reasoning. `reasoning` is then
    the text before these tokens. `content` is the text after these tokens, or None if the answer ended
    earlier. Otherwise `content` is the whole text, and `reasoning` is None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    detail: str = ""
    logprobs: Logprobs | None = None
    after: tuple[int, ...] = ()
    reasoning: str | None = None
    content: str | None = ""
    code: ErrorCode | None = None
    confidences: list[TokenConfidence] | None = None
    field_confidence: dict[str, FieldConfidence] | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens before the last token in `after`. ChoiceDeltas counts in the same way."""
        if not self.after:
            return 0
        end = find_end(self.token_ids, self.after)
        return len(self.token_ids) if end is None else end - 1


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete answer to a prompt. `text`, `token_ids` and `finish_reason` belong to the first choice.

    `num_drafts` counts the drafted tokens for all choices, and `num_accepted` counts the accepted draft
    tokens. Both numbers cover only the current process. `notes` has remarks on the response format. After a
    restart, `notes` may lack remarks from the process that accepted the request. `prompt_logprobs` is
    computed from `prompt_scores`. `vector` is a pooled request's result.
    """

    request_id: str
    prompt_token_ids: np.ndarray  # int32 [n]
    choices: list[Choice]
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    notes: tuple[Note, ...] = ()
    prompt_scores: PromptLogprobs | None = None
    vector: np.ndarray | None = None  # float32 [d]

    @property
    def prompt_logprobs(self) -> list[tuple[tuple[int, float], ...] | None] | None:
        """(token id, logprob) pairs for each prompt token: first its own pair, then the most likely tokens'
        pairs.

        The first token has None instead, since no token precedes it. The value is None if logprobs were not
        requested.
        """
        return None if self.prompt_scores is None else [None, *entries_of(self.prompt_scores)[1:]]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts under OpenAI's names. prompt_tokens includes the cached tokens.

        The dict includes the reasoning token count if a grammar begins after reasoning, and the accepted and
        rejected draft token counts if tokens were drafted.
        """
        prompt, completion = len(self.prompt_token_ids), sum(len(choice.token_ids) for choice in self.choices)
        found: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": self.num_cached_tokens,
        }
        details: dict[str, int] = {}
        if any(choice.after for choice in self.choices):
            details["reasoning_tokens"] = sum(choice.num_reasoning_tokens for choice in self.choices)
        if self.num_drafts:
            details["accepted_prediction_tokens"] = self.num_accepted
            details["rejected_prediction_tokens"] = self.num_drafts - self.num_accepted
        if details:
            found["completion_tokens_details"] = details
        return found

    def error(self) -> MMEngineError | None:
        """Return the error from the first choice that failed or was aborted, or None."""
        for choice in self.choices:
            if choice.finish_reason == "rejected":
                # A full queue is the only reason to reject a request after it was checked.
                return QueueFull(choice.detail)
            if choice.finish_reason in ("error", "abort"):
                text = _ENDS.get(choice.code) or f"the request failed: {choice.detail}"
                return RequestFailed(text, code=choice.code)
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the answer's fields for an answer file's line, without the custom_id."""
        if len(self.choices) == 1:
            fields = _choice_json(self.choices[0])
        else:
            fields = {"choices": [{"index": c.index, **_choice_json(c)} for c in self.choices]}
        if self.prompt_scores is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        if self.notes:
            fields["notes"] = msgspec.to_builtins(self.notes)
        return {**fields, "usage": self.usage}


def _choice_json(choice: Choice) -> dict[str, object]:
    fields: dict[str, object] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    if choice.after:
        fields |= {"reasoning": choice.reasoning, "content": choice.content}
    if choice.detail == CLOSED or (choice.finish_reason in ("length", "repetition") and choice.detail):
        fields["detail"] = choice.detail
    if choice.logprobs is not None:
        fields["logprobs"] = choice.logprobs
    if choice.field_confidence is not None:
        fields["field_confidence"] = msgspec.to_builtins(choice.field_confidence)
    return fields


class RequestOutput(msgspec.Struct, frozen=True, eq=False):
    """New `text` and `token_ids` for the choice `index` after a step.

    A choice's last output has `finish_reason` and `detail`, and the request's last output has `completion`.
    `finish_reason`, `detail` and `after` have the same meaning as in Choice. If requested, `logprobs` has the
    tokens' logprobs, and `confidences` has the tokens' confidences. If requested, `prompt_scores` has the
    prompt's logprobs and comes with the first token in choice 0.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    completion: Completion | None = None
    after: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    detail: str = ""
    prompt_scores: PromptLogprobs | None = None
    code: ErrorCode | None = None
    confidences: list[TokenConfidence] | None = None


def split_output(output: RequestOutput) -> list[RequestOutput]:
    """Split an output without text into small outputs, so that a reader with many tokens does not delay other
    readers.
    """
    ids, scores, confidences = output.token_ids, output.logprobs, output.confidences
    if len(ids) <= PIECE:
        return [output]
    pieces = [
        RequestOutput(
            output.request_id,
            output.index,
            "",
            ids[at : at + PIECE],
            after=output.after,
            logprobs=None if scores is None else scores[at : at + PIECE],
            confidences=None if confidences is None else confidences[at : at + PIECE],
        )
        for at in range(0, len(ids), PIECE)
    ]
    pieces[0] = msgspec.structs.replace(pieces[0], prompt_scores=output.prompt_scores)
    pieces[-1] = msgspec.structs.replace(
        pieces[-1],
        finish_reason=output.finish_reason,
        completion=output.completion,
        detail=output.detail,
        code=output.code,
    )
    return pieces


def entries_of(scores: PromptLogprobs) -> list[tuple[tuple[int, float], ...]]:
    """Return (token id, logprob) pairs for each prompt token: first its own pair, then the most likely
    tokens' pairs.

    The first prompt token's logprobs are NaN.
    """
    rows = zip(scores.token_ids.tolist(), scores.logprobs.tolist(), strict=True)
    return [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]


def engine_failed(error: BaseException) -> MMEngineError:
    """Return `error` as a new MMEngineError, because each caller raises a separate object."""
    if isinstance(error, MMEngineError):
        return copy(error)
    return ExecutorFailed(f"{type(error).__name__}: {error}")


def finish_detail(reason: str, detail: str, *, has_form: bool) -> str:
    """Return `Choice.detail`. For a cut answer with a grammar, this is CUT, CUT_AT_STOP or REPEATED."""
    if has_form and reason == "length":
        return CUT_AT_STOP if detail == CUT_BY_STRING else CUT
    if has_form and detail == REPETITION:
        return REPEATED
    return CLOSED if detail == REPETITION_CLOSED else detail


def unstarted_completion(request_id: str, num_choices: int, detail: str, code: ErrorCode) -> Completion:
    """Return the answer to a request that was aborted before its prompt was tokenized."""
    choices = [Choice(index, "", [], "abort", detail, code=code) for index in range(num_choices)]
    return Completion(request_id, np.zeros(0, np.int32), choices)


def final_outputs(completion: Completion) -> list[RequestOutput]:
    """Return each choice's last output, without tokens."""
    outputs = [
        RequestOutput(
            completion.request_id,
            choice.index,
            "",
            [],
            choice.finish_reason,
            detail=choice.detail,
            code=choice.code,
        )
        for choice in completion.choices
    ]
    outputs[-1] = msgspec.structs.replace(outputs[-1], completion=completion)
    return outputs


def answer_to_prompt(answer: Completion | MMEngineError, index: int, is_one_of_several: bool) -> Completion:
    """Return the answer to prompt `index` if the answer is complete, or raise its error.

    If the call has several prompts, the error names the prompt.
    """
    try:
        return require_success(answer)
    except MMEngineError as error:
        raise (error.within(PROMPTS, index) if is_one_of_several else error) from None


def require_success(answer: Completion | MMEngineError) -> Completion:
    """Return `answer` if it is complete, or raise its error."""
    if isinstance(answer, MMEngineError):
        raise answer
    error = answer.error()
    if error is not None:
        raise error
    return answer

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
PIECE = 64  # maximum tokens per output from `split_output`
Logprobs = list[tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` answers to a prompt.

    `text` ends before a stop string, but `token_ids` has all sampled tokens. finish_reason is stop, length,
    repetition, abort, error or rejected. `detail` explains the reason. With a response format, CUT or
    CUT_AT_STOP explains the reason "length". The detail CLOSED means that the engine completed the answer's
    JSON value. `logprobs` has (token id, logprob) pairs for each token: the sampled token's pair, then the
    most likely tokens' pairs.

    If requested, `field_confidence` has the fields' confidences by JSON pointer. `confidences` then has a
    value for each token that this engine sampled. First tokens that another engine sampled
    (`Options.outputs`) have no value. After a restart, the log provides the earlier values.

    If the grammar begins after reasoning, `after` has the tokens that end the reasoning. `reasoning` is the
    text before these tokens, and `content` the text after them, or None if the answer ended earlier.
    Otherwise, `content` is the whole text, and `reasoning` is None.
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
        """The number of tokens before the last token in `after`. All tokens if the reasoning did not end."""
        if not self.after:
            return 0
        end = find_end(self.token_ids, self.after)
        return len(self.token_ids) if end is None else end - 1


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete answer to a prompt. `text`, `token_ids` and `finish_reason` belong to the first choice.
    `num_drafts`, `num_accepted`: drafted and accepted tokens of all choices, in the current process only.
    `notes`: remarks on the response format. After a restart, earlier remarks may be missing. `vector`: a
    pooled request's result.
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
        """(token id, logprob) pairs for each prompt token: the token's own pair, then the most likely tokens'
        pairs. The first token has None, because no token precedes it. The property is None if logprobs were
        not requested.
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

        Reasoning tokens are counted if a grammar begins after reasoning, and draft tokens if tokens were
        drafted.
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
        """Return the error of the first failed or aborted choice, or None."""
        for choice in self.choices:
            if choice.finish_reason == "rejected":
                # The request has passed all checks, so only a full queue explains the rejection.
                return QueueFull(choice.detail)
            if choice.finish_reason in ("error", "abort"):
                text = _ENDS.get(choice.code) or f"the request failed: {choice.detail}"
                return RequestFailed(text, code=choice.code)
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the fields for a line in an answer file, without the custom_id."""
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
    `after`, `finish_reason` and `detail` are as in Choice. If requested, `logprobs` and `confidences` have a
    value for each token. `prompt_scores`: the prompt's logprobs, if requested. Only the output with choice
    0's first token has this field.
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
    """Split an output without text into small outputs, so that a long output does not delay other readers."""
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
    """Return (token id, logprob) pairs for each prompt token: the token's own pair, then the most likely
    tokens' pairs. The first prompt token's logprobs are NaN.
    """
    rows = zip(scores.token_ids.tolist(), scores.logprobs.tolist(), strict=True)
    return [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]


def engine_failed(error: BaseException) -> MMEngineError:
    """Return a new MMEngineError for `error`. Each caller must raise a separate object."""
    if isinstance(error, MMEngineError):
        return copy(error)
    return ExecutorFailed(f"{type(error).__name__}: {error}")


def finish_detail(reason: str, detail: str, *, has_form: bool) -> str:
    """Return `Choice.detail`. For a truncated answer with a grammar, this is CUT, CUT_AT_STOP or REPEATED."""
    if has_form and reason == "length":
        return CUT_AT_STOP if detail == CUT_BY_STRING else CUT
    if has_form and detail == REPETITION:
        return REPEATED
    return CLOSED if detail == REPETITION_CLOSED else detail


def unstarted_completion(request_id: str, num_choices: int, detail: str, code: ErrorCode) -> Completion:
    """Return the answer to a request that was aborted before tokenization."""
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
    """Return a complete answer, or raise its error. If the call has several prompts, the error names prompt
    `index`.
    """
    try:
        return require_success(answer)
    except MMEngineError as error:
        raise (error.within(PROMPTS, index) if is_one_of_several else error) from None


def require_success(answer: Completion | MMEngineError) -> Completion:
    """Return a complete answer, or raise its error."""
    if isinstance(answer, MMEngineError):
        raise answer
    error = answer.error()
    if error is not None:
        raise error
    return answer

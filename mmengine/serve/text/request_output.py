"""What callers get back."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mmengine.core.executor import CUT as CUT_BY_STRING
from mmengine.core.executor import PromptLogprobs
from mmengine.errors import PROMPTS, ErrorCode, ExecutorFailed, MMEngineError, QueueFull, RequestFailed
from mmengine.structured_output.grammar_start import find_end
from mmengine.structured_output.json_schema.vocabulary.notes import Note

_ENDS: dict[ErrorCode | None, str] = {
    ErrorCode.DEADLINE_EXCEEDED: "the deadline passed before the answer was complete",
    ErrorCode.CANCELLED: "the request was cancelled",
}
CUT = "the answer was cut at max_tokens, or where the model's length ends: its form is not complete"
CUT_AT_STOP = "a stop string cut the answer: its form is not complete"
CLOSED = "closed"  # detail of an answer that was completed because its budget ended
PIECE = 64  # tokens of news that came at once
Logprobs = list[tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers to a prompt.

    `text` ends before a stop string; `token_ids` are all tokens that were sampled. finish_reason:
    stop, length, abort, error or rejected; `detail` says more, as CUT or CUT_AT_STOP where a form was asked
    for and the answer ends with "length", or CLOSED. `logprobs`: for each token its
    (token id, logprob) pairs, the chosen one first.

    Where the form begins behind `after`, the tokens that end reasoning, `reasoning` is the text before
    them and `content` that behind them, None where they were not said. Else `content` is all the text, and
    there is no `reasoning`.
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

    @property
    def num_reasoning_tokens(self) -> int:
        """Those before the token that ends reasoning, as ChoiceDeltas counts them: the last of `after`."""
        if not self.after:
            return 0
        end = find_end(self.token_ids, self.after)
        return len(self.token_ids) if end is None else end - 1


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt; `text`, `token_ids`, `finish_reason` are the first choice's.
    `num_drafts` were computed for all choices, `num_accepted` of them kept: by the process that gives the
    answer. `notes`: on the form that was asked for, of the process that was asked. `prompt_scores`: what
    `prompt_logprobs` are made of."""

    request_id: str
    prompt_token_ids: np.ndarray  # int32 [n]
    choices: list[Choice]
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    notes: tuple[Note, ...] = ()
    prompt_scores: PromptLogprobs | None = None

    @property
    def prompt_logprobs(self) -> list[tuple[tuple[int, float], ...] | None] | None:
        """For each token of the prompt its (token id, logprob) pairs, its own first, where asked for. The
        first token has none: nothing stands before it."""
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
        """Token counts, by OpenAI's names; cached tokens are part of the prompt's. Where a form begins behind
        reasoning, how many tokens that is; where there were drafts, how many of them were kept and how many
        not."""
        prompt, completion = len(self.prompt_token_ids), sum(len(choice.token_ids) for choice in self.choices)
        found: dict[str, Any] = {
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
        """Why there is no answer, where a choice was given up; None after stop and length."""
        for choice in self.choices:
            if choice.finish_reason == "rejected":
                return QueueFull(choice.detail)  # there is no other reason after the door
            if choice.finish_reason in ("error", "abort"):
                text = _ENDS.get(choice.code) or f"the request failed: {choice.detail}"
                return RequestFailed(text, code=choice.code)
        return None

    def as_json(self) -> dict[str, Any]:
        """The answer as a line of a batch file holds it, without its custom_id."""
        if len(self.choices) == 1:
            fields = _choice_json(self.choices[0])
        else:
            fields = {"choices": [{"index": c.index, **_choice_json(c)} for c in self.choices]}
        if self.prompt_scores is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        if self.notes:
            fields["notes"] = msgspec.to_builtins(self.notes)
        return {**fields, "usage": self.usage}


def _choice_json(choice: Choice) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    if choice.after:
        fields |= {"reasoning": choice.reasoning, "content": choice.content}
    if choice.detail == CLOSED or (choice.finish_reason == "length" and choice.detail):
        fields["detail"] = choice.detail
    if choice.logprobs is not None:
        fields["logprobs"] = choice.logprobs
    return fields


class RequestOutput(msgspec.Struct, frozen=True, eq=False):
    """News of one answer after a step: new `text` and `token_ids` of choice `index`.

    `finish_reason` is set with its last news, and `detail` as in Choice. `completion` comes with the last of
    all choices. `after`: as of Choice. `logprobs`: for each of the tokens, where asked for. `prompt_scores`:
    of the prompt, where asked for, with the first token of choice 0.
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


def split_output(output: RequestOutput) -> list[RequestOutput]:
    """News without a text, of so few tokens each that whoever takes them does not keep others waiting."""
    ids, scores = output.token_ids, output.logprobs
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
    """Of each token of a prompt: its id and logprob, then the likeliest ones'. The first has no logprobs; NaN
    stands for them."""
    rows = zip(scores.token_ids.tolist(), scores.logprobs.tolist(), strict=True)
    return [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in rows]


def engine_failed(error: BaseException) -> MMEngineError:
    """The failure of a whole engine, as an error for each of its waiters."""
    if isinstance(error, MMEngineError):
        return copy(error)
    return ExecutorFailed(f"{type(error).__name__}: {error}")


def finish_detail(reason: str, detail: str, *, has_form: bool) -> str:
    """As Choice tells it: of a form that was cut, where."""
    if has_form and reason == "length":
        return CUT_AT_STOP if detail == CUT_BY_STRING else CUT
    return detail


def unstarted_completion(request_id: str, num_choices: int, detail: str, code: ErrorCode) -> Completion:
    """The answer to a request that was given up before it became tokens."""
    choices = [Choice(index, "", [], "abort", detail, code=code) for index in range(num_choices)]
    return Completion(request_id, np.zeros(0, np.int32), choices)


def final_outputs(completion: Completion) -> list[RequestOutput]:
    """The last news of its choices, without tokens."""
    news = [
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
    news[-1] = msgspec.structs.replace(news[-1], completion=completion)
    return news


def answer_to_prompt(answer: Completion | MMEngineError, index: int, is_one_of_several: bool) -> Completion:
    """Return the answer to the prompt of this index, which is whole.

    Raises the error of an answer that is not; with several prompts it says which of them."""
    try:
        return require_success(answer)
    except MMEngineError as error:
        raise (error.within(PROMPTS, index) if is_one_of_several else error) from None


def require_success(answer: Completion | MMEngineError) -> Completion:
    """The answer, which is whole. Raises the error of an answer that is not."""
    if isinstance(answer, MMEngineError):
        raise answer
    error = answer.error()
    if error is not None:
        raise error
    return answer

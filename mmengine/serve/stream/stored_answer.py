"""Defines how complete answers are stored beside the log. A stored answer has no texts; readers decode the
tokens again.
"""

import msgspec
import numpy as np

from mmengine.errors import ErrorCode
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.text.choice_order import in_order
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import Choice, Completion, Logprobs, RequestOutput
from mmengine.token_confidence import TokenConfidence


class StoredChoice(msgspec.Struct, array_like=True):
    """A choice in a stored answer, without text."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    detail: str = ""
    logprobs: Logprobs | None = None
    code: ErrorCode | None = None
    confidences: list[TokenConfidence] | None = None


class StoredAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A complete answer in the store. Later versions may only add fields with a default."""

    request_id: str
    sampling: SamplingParams
    reasoning: ReasoningTokens
    grammar: GrammarRequest | None
    num_embeds: dict[str, int]
    num_prompt_tokens: int
    choices: list[StoredChoice]
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    order: bytes = b""  # with several choices: for each generated token, an index in `choices`


def outputs_of_stored(answer: StoredAnswer) -> list[RequestOutput]:
    """Return a stored answer's outputs. The last output has the completion."""
    choices = [
        Choice(
            choice.index,
            "",
            choice.token_ids,
            choice.finish_reason or "",
            choice.detail,
            choice.logprobs,
            code=choice.code,
            confidences=choice.confidences,
        )
        for choice in answer.choices
    ]
    completion = Completion(
        answer.request_id,
        np.zeros(answer.num_prompt_tokens, np.int32),
        choices,
        answer.num_cached_tokens,
        answer.num_drafts,
        answer.num_accepted,
    )
    outputs = [
        RequestOutput(
            answer.request_id,
            choice.index,
            "",
            choice.token_ids,
            choice.finish_reason,
            logprobs=choice.logprobs,
            detail=choice.detail,
            code=choice.code,
            confidences=choice.confidences,
        )
        for choice in answer.choices
    ]
    outputs[-1] = msgspec.structs.replace(outputs[-1], completion=completion)
    return in_order(outputs, answer.order)

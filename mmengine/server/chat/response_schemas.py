"""The response schemas in the OpenAPI document.

For speed, the server encodes most frames by hand instead of from these structs. Tests validate each response
against these schemas, which allow no unknown fields.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from mmengine.server.http.errors import ErrorBody


class ResponseSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base class for response schemas. Fields with the default UNSET may be absent."""


class PromptTokens(ResponseSchema):
    cached_tokens: int
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET


class CompletionTokens(ResponseSchema):
    reasoning_tokens: int
    accepted_prediction_tokens: int  # Accepted draft tokens.
    rejected_prediction_tokens: int


class _Counts(ResponseSchema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(_Counts):
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class EventUsage(_Counts):
    """Token counts in events.

    The last event has the counts of all choices, with details. With continuous_usage_stats, each earlier
    event has the counts of its choice.
    """

    prompt_tokens_details: PromptTokens | UnsetType = UNSET
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class LikelyToken(ResponseSchema):
    token: str
    logprob: float
    bytes: list[int]


class Token(LikelyToken):
    top_logprobs: list[LikelyToken]


class Logprobs(ResponseSchema):
    content: list[Token]
    refusal: None


class CalledFunction(ResponseSchema):
    name: str
    arguments: str


class Call(ResponseSchema):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ArgumentFault(ResponseSchema):
    """A tool call whose arguments violate the tool's schema. `call`: the index of the tool call in
    tool_calls.
    """

    call: int
    message: str


class OtherFieldValue(ResponseSchema):
    """Another value that a field might have had. `begins`: the beginning of its JSON text."""

    p: float
    value: str | float | bool | None | UnsetType = UNSET
    begins: str | UnsetType = UNSET


class FieldConfidence(ResponseSchema):
    """How sure the model was of a field's value."""

    p: float
    min: float
    entropy: float
    others: list[OtherFieldValue]


class AnswerBox(ResponseSchema):
    """A box in pixels: left, top, right, bottom. `problem`: why the model's value is wrong."""

    pixels: tuple[float, float, float, float] | None
    problem: str | UnsetType = UNSET


class Message(ResponseSchema):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # A copy of reasoning_content, with --reasoning-fields both.
    tool_calls: list[Call] | UnsetType = UNSET
    field_confidence: dict[str, FieldConfidence] | UnsetType = UNSET
    boxes: dict[str, AnswerBox] | UnsetType = UNSET


class _Choice(ResponseSchema):
    index: int
    stop_reason: str | int | None


class ChatChoice(_Choice):
    message: Message
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length", "repetition", "tool_calls"]
    argument_errors: list[ArgumentFault] | UnsetType = UNSET


class _Answer(ResponseSchema):
    id: str
    created: int
    model: str


class ChatAnswer(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(ResponseSchema):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(ResponseSchema):
    """A part of a tool call in a stream. The first part has the id, type and name. Later parts extend the
    arguments.
    """

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(ResponseSchema):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # A copy of reasoning_content, with --reasoning-fields both.
    tool_calls: list[CallDelta] | UnsetType = UNSET
    field_confidence: dict[str, FieldConfidence] | UnsetType = UNSET  # In the last event.
    boxes: dict[str, AnswerBox] | UnsetType = UNSET  # In the last event.


class ChatChoiceDelta(ResponseSchema):
    index: int
    delta: MessageDelta
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length", "repetition", "tool_calls"] | None
    stop_reason: str | int | None | UnsetType = UNSET
    argument_errors: list[ArgumentFault] | UnsetType = UNSET


class ChatEvent(_Answer):
    """A stream event's data. [DONE] follows the last event."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChoiceDelta]
    usage: EventUsage | None | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class TextLogprobs(ResponseSchema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"]
    field_confidence: dict[str, FieldConfidence] | UnsetType = UNSET


class TextAnswer(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextChoiceDelta(ResponseSchema):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"] | None
    stop_reason: str | int | None | UnsetType = UNSET
    field_confidence: dict[str, FieldConfidence] | UnsetType = UNSET  # In the last event.


class TextEvent(_Answer):
    """A stream event's data. [DONE] follows the last event."""

    object: Literal["text_completion"]
    choices: list[TextChoiceDelta]
    usage: EventUsage | None | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class ModelCard(ResponseSchema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(ResponseSchema):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(ResponseSchema):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(ResponseSchema):
    prompt: str


class Health(ResponseSchema):
    status: Literal["ready", "not ready"]
    reasons: list[str]


class Alive(ResponseSchema):
    status: Literal["alive"]


class Version(ResponseSchema):
    version: str


class Page(ResponseSchema):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Refusal(ResponseSchema):
    """The body for an error response, and the data for an error event in a stream."""

    error: ErrorBody

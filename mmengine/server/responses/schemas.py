"""The response schemas for /v1/responses in the OpenAPI document."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from mmengine.server.chat.response_schemas import (
    AnswerBox,
    ArgumentFault,
    FieldConfidence,
    Page,
    ResponseSchema,
    Token,
)
from mmengine.server.http.errors import ErrorBody

_Json = dict[str, object]
_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseSchema, tag="output_text"):
    text: str
    annotations: list[None]
    logprobs: list[Token]
    field_confidence: dict[str, FieldConfidence] | UnsetType = UNSET
    boxes: dict[str, AnswerBox] | UnsetType = UNSET


class ReasoningText(ResponseSchema, tag="reasoning_text"):
    text: str


class OutputMessage(ResponseSchema, tag="message"):
    id: str
    role: Literal["assistant"]
    status: _Status
    content: list[OutputText]


class ReasoningItem(ResponseSchema, tag="reasoning"):
    id: str
    status: _Status
    summary: list[None]
    content: list[ReasoningText]


class FunctionCallItem(ResponseSchema, tag="function_call"):
    id: str
    status: _Status
    call_id: str
    name: str
    arguments: str


class CustomToolCallItem(ResponseSchema, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokens(ResponseSchema):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(ResponseSchema):
    reasoning_tokens: int


class ResponseUsage(ResponseSchema):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFault(ResponseSchema):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "invalid_image"]
    message: str


class Incomplete(ResponseSchema):
    reason: Literal["max_output_tokens", "repetition"]


class TextEcho(ResponseSchema):
    format: _Json
    verbosity: Literal["low", "medium", "high"]


class ReasoningEcho(ResponseSchema):
    effort: str | None
    summary: None


class Response(ResponseSchema):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFault | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | _Json
    tools: list[_Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | UnsetType = UNSET
    argument_errors: list[ArgumentFault] | UnsetType = UNSET


class _Event(ResponseSchema):
    sequence_number: Annotated[int, msgspec.Meta(ge=0)]


class _OfResponse(_Event):
    response: Response


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseQueued(_OfResponse, tag="response.queued"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class _OfItem(_Event):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, tag="response.output_item.done"):
    pass


class _InItem(_Event):
    item_id: str
    output_index: int


class _InPart(_InItem):
    content_index: Literal[0]


class PartAdded(_InPart, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_InPart, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_InPart, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Token]
    obfuscation: str | UnsetType = UNSET


class TextDone(_InPart, tag="response.output_text.done"):
    text: str
    logprobs: list[Token]


class ReasoningDelta(_InPart, tag="response.reasoning_text.delta"):
    delta: str
    obfuscation: str | UnsetType = UNSET


class ReasoningDone(_InPart, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_InItem, tag="response.function_call_arguments.delta"):
    delta: str
    obfuscation: str | UnsetType = UNSET


class ArgumentsDone(_InItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_InItem, tag="response.custom_tool_call_input.delta"):
    delta: str
    obfuscation: str | UnsetType = UNSET


class CustomInputDone(_InItem, tag="response.custom_tool_call_input.done"):
    input: str


class StreamError(_Event, tag="error"):
    """The last event of a stream that ends before the response is complete. The event repeats the number of
    the previous event.
    """

    code: str | None
    message: str
    param: str | None
    error: ErrorBody


EVENTS = (
    *(ResponseCreated, ResponseQueued, ResponseInProgress, ItemAdded, PartAdded, TextDelta, TextDone),
    *(ReasoningDelta, ReasoningDone, ArgumentsDelta, ArgumentsDone, PartDone, ItemDone),
    *(CustomInputDelta, CustomInputDone),
    *(ResponseCompleted, ResponseIncomplete, ResponseFailed, StreamError),
)


class ResponseDeleted(ResponseSchema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Page):
    """A page of input items. The text sha256:DIGEST replaces media that were sent as data."""

    data: list[_Json]

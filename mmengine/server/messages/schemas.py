"""The response schemas for /v1/messages in the OpenAPI document."""

from typing import Literal

from msgspec import UNSET, UnsetType

from mmengine.server.chat.response_schemas import AnswerBox, ArgumentFault, FieldConfidence, ResponseSchema

_Stop = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(ResponseSchema, tag="text"):
    text: str


class ThinkingBlock(ResponseSchema, tag="thinking"):
    """A thinking block. `signature`: the SHA-256 of the text in hex. In requests, every signature is
    accepted.
    """

    thinking: str
    signature: str


class ToolUseBlock(ResponseSchema, tag="tool_use"):
    id: str
    name: str
    input: dict[str, object]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(ResponseSchema):
    thinking_tokens: int


class MessageUsage(ResponseSchema):
    """Token counts. `input_tokens` excludes cache_read_input_tokens. In the event message_start,
    `input_tokens` includes the cached tokens, because their number is not known yet.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageAnswer(ResponseSchema, tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: _Stop | None
    stop_sequence: str | None
    usage: MessageUsage
    argument_errors: list[ArgumentFault] | UnsetType = UNSET
    field_confidence: dict[str, FieldConfidence] | UnsetType = UNSET
    boxes: dict[str, AnswerBox] | UnsetType = UNSET


class InputTokenCount(ResponseSchema):
    input_tokens: int


class MessageStart(ResponseSchema, tag="message_start"):
    message: MessageAnswer


class ContentBlockStart(ResponseSchema, tag="content_block_start"):
    index: int
    content_block: Block


class TextBlockDelta(ResponseSchema, tag="text_delta"):
    text: str


class ThinkingDelta(ResponseSchema, tag="thinking_delta"):
    thinking: str


class SignatureDelta(ResponseSchema, tag="signature_delta"):
    signature: str


class InputJsonDelta(ResponseSchema, tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(ResponseSchema, tag="content_block_delta"):
    index: int
    delta: TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(ResponseSchema, tag="content_block_stop"):
    index: int


class StopDelta(ResponseSchema):
    stop_reason: _Stop
    stop_sequence: str | None


class MessageDeltaEvent(ResponseSchema, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    argument_errors: list[ArgumentFault] | UnsetType = UNSET
    field_confidence: dict[str, FieldConfidence] | UnsetType = UNSET
    boxes: dict[str, AnswerBox] | UnsetType = UNSET


class MessageStop(ResponseSchema, tag="message_stop"):
    pass


class MessageFault(ResponseSchema):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class MessageRefusal(ResponseSchema, tag="error"):
    """The body for an error response, and the data for an error event in a stream."""

    error: MessageFault
    request_id: str | None


MESSAGE_EVENTS = (
    MessageStart,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDeltaEvent,
    MessageStop,
    MessageRefusal,
)

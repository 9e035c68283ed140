"""The structs that declare the body of /v1/responses."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mmengine.server.chat.bodies import FUNCTIONS, ONE_CALL, SHOW_REASONING, TEMPLATE, SharedBody
from mmengine.server.http.body_fields import supported, translated_field
from mmengine.server.http.errors import Json

MAX_METADATA = 16  # Maximum number of pairs in metadata.
MAX_METADATA_NAME = 64  # Maximum number of characters in a key of metadata.
MAX_METADATA_TEXT = 512  # Maximum number of characters in a value of metadata.
# Maximum number of characters in user, prompt_cache_key and previous_response_id. Responses repeat these
# fields.
MAX_NAME_CHARS = 256
MAX_SAFETY_CHARS = 128  # Maximum number of characters in safety_identifier.
MAX_INCLUDE = 16  # Maximum number of names in include.
LOGPROBS = "message.output_text.logprobs"
Metadata = dict[
    Annotated[str, Meta(max_length=MAX_METADATA_NAME)], Annotated[str, Meta(max_length=MAX_METADATA_TEXT)]
]
_Named = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class ResponsesStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: dict[str, msgspec.Raw] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """The field `reasoning`. `summary` and its older name `generate_summary` have no effect."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(SharedBody, frozen=True, kw_only=True):
    """The /v1/responses body. None means that the field is absent or null."""

    input: Annotated[
        str | Annotated[list[Json], Meta(min_length=1)],
        supported(
            "a text, or items: messages of input_text, input_image (image_url or file_id, detail, "
            "min_pixels, max_pixels), input_video, output_text and refusal; function_call, "
            "function_call_output, reasoning"
        ),
    ]
    instructions: Annotated[
        str | None,
        supported("a system message before all other messages; later responses do not inherit the message"),
    ] = None
    previous_response_id: Annotated[
        _Named | None, supported("the named response's input and output precede this input")
    ] = None
    tools: Annotated[list[Json] | None, FUNCTIONS] = None
    tool_choice: Annotated[
        str | Json | None,
        supported("none (the prompt shows no tool), auto, required, a function, allowed_tools"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, ONE_CALL] = None
    max_output_tokens: Annotated[
        int | None, supported("includes reasoning; default: the rest of the context")
    ] = None
    max_tool_calls: Annotated[
        int | None,
        supported("returned as sent; limits only built-in tools, and the server has no built-in tools"),
    ] = None
    text: Annotated[
        TextOptions | None,
        supported(
            "format: text, json_object, json_schema, structural_tag, with bounds, on_truncation, "
            "field_confidence and boxes; verbosity is returned as sent"
        ),
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None,
        translated_field(
            "effort none: a thinking_token_budget of 0, otherwise the model decides; reasoning items hold "
            "the full reasoning, never a summary"
        ),
    ] = None
    top_logprobs: Annotated[
        int | None, supported("0 to 20; requires include message.output_text.logprobs")
    ] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=MAX_INCLUDE)] | None,
        supported(
            "message.output_text.logprobs; reasoning.encrypted_content adds nothing, because reasoning is "
            "not encrypted"
        ),
    ] = None
    metadata: Annotated[
        Annotated[Metadata, Meta(max_length=MAX_METADATA)] | None,
        supported("up to 16 names of up to 64 characters, each with a text of up to 512 characters"),
    ] = None
    stream_options: Annotated[
        ResponsesStreamOptions | None, supported("include_obfuscation (default: false)")
    ] = None
    context_management: Annotated[
        list[Json] | None, supported("compaction with a compact_threshold of at least max_model_len")
    ] = None
    background: Annotated[bool | None, supported("the answer continues when the client disconnects")] = None
    store: Annotated[bool | None, supported("default: true; false with background is refused")] = None
    user: Annotated[_Named | None, supported("returned as sent, up to 256 characters")] = None
    safety_identifier: Annotated[
        Annotated[str, Meta(max_length=MAX_SAFETY_CHARS)] | None,
        supported("returned as sent, up to 128 characters"),
    ] = None
    prompt_cache_key: Annotated[
        _Named | None,
        supported("returned as sent, up to 256 characters; prefixes are matched by content"),
    ] = None
    chat_template_kwargs: Annotated[Json | None, TEMPLATE] = None
    include_reasoning: Annotated[bool | None, SHOW_REASONING] = None


AS_CHAT = (  # Fields that have the same name and meaning in a chat body.
    *SharedBody.__struct_fields__,
    *("chat_template_kwargs", "include_reasoning", "parallel_tool_calls"),
)
decode = msgspec.json.Decoder(ResponsesBody).decode

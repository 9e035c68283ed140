"""The body of /v1/responses, as its table says it is taken."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mmengine.server.chat.parsed_request import Json, SharedBody

MAX_METADATA = 16  # pairs of it
MAX_METADATA_NAME = 64  # characters of each one's name
MAX_METADATA_TEXT = 512  # characters of each one's text
MAX_NAME_CHARS = 256  # of what a response repeats: user, prompt_cache_key, previous_response_id
MAX_SAFETY_CHARS = 128  # of safety_identifier
MAX_INCLUDE = 16  # names in include
LOGPROBS = "message.output_text.logprobs"
Metadata = dict[
    Annotated[str, Meta(max_length=MAX_METADATA_NAME)], Annotated[str, Meta(max_length=MAX_METADATA_TEXT)]
]
_Named = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class TextAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, msgspec.Raw] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`summary` and `generate_summary`, its older name: nothing is summarized."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(SharedBody, frozen=True, kw_only=True):
    """None: left out, or null."""

    input: str | Annotated[list[Json], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: _Named | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    text: TextAsked | None = None
    reasoning: ReasoningAsked | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDE)] | None = None
    metadata: Annotated[Metadata, Meta(max_length=MAX_METADATA)] | None = None
    stream_options: ResponsesStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    user: _Named | None = None
    safety_identifier: Annotated[str, Meta(max_length=MAX_SAFETY_CHARS)] | None = None
    prompt_cache_key: _Named | None = None
    chat_template_kwargs: Json | None = None
    include_reasoning: bool | None = None


AS_CHAT = (  # fields that chat has too, and reads the same
    *SharedBody.__struct_fields__,
    *("chat_template_kwargs", "include_reasoning", "parallel_tool_calls"),
)
decode = msgspec.json.Decoder(ResponsesBody).decode

"""The structs that declare the bodies of /v1/chat/completions, /v1/completions, /tokenize and /detokenize.

Each field is declared once, with its type, its limits, and the server's treatment of the field. The OpenAPI
document, the check for unknown fields and the tables in the HTTP reference are derived from these structs.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from mmengine.request import RepetitionDetection
from mmengine.server.http.body_fields import supported, translated_field
from mmengine.server.http.errors import Json

MAX_ITEM_KWARGS = 32  # Maximum number of names in mm_processor_kwargs.
Messages = Annotated[list[Json], Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0)]
ItemOptions = Annotated[Json, Meta(max_length=MAX_ITEM_KWARGS)]
# Descriptions of fields that the other APIs share.
MODEL = supported("a served name; default: the first served name")
TEMPLATE = supported("variables of the chat template, such as enable_thinking")
ONE_CALL = supported("false: the answer ends after its first tool call")
SHOW_REASONING = supported("false: reasoning is counted but not returned")
FUNCTIONS = supported("functions; requires a chat template that supports tools")
_OPENAI, _VLLM = supported("as in OpenAI's API"), supported("as in vLLM's API")
_CHAT = supported("as in /v1/chat/completions")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SharedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all routes with generated answers share. None means that the field is absent or null."""

    model: Annotated[str | None, MODEL] = None
    temperature: Annotated[float | None, _OPENAI] = None
    top_p: Annotated[float | None, _OPENAI] = None
    presence_penalty: Annotated[float | None, _OPENAI] = None
    frequency_penalty: Annotated[float | None, _OPENAI] = None
    stream: Annotated[bool | None, _OPENAI] = None
    min_p: Annotated[float | None, _VLLM] = None
    repetition_penalty: Annotated[float | None, _VLLM] = None
    stop_token_ids: Annotated[list[int] | None, _VLLM] = None
    min_tokens: Annotated[int | None, _VLLM] = None
    ignore_eos: Annotated[bool | None, _VLLM] = None
    repetition_detection: Annotated[RepetitionDetection | None, _VLLM] = None
    top_k: Annotated[int | None, translated_field("0 and -1 turn the filter off")] = None
    seed: Annotated[
        int | None, translated_field("63 bits; a negative seed is mapped to another number; default: random")
    ] = None
    stop: Annotated[
        str | list[str] | None,
        translated_field(
            "a string or a list; if a stop string cuts structured output short, the finish reason is length, "
            "or the text is closed (on_truncation)"
        ),
    ] = None
    logit_bias: Annotated[dict[str, float] | None, translated_field("keys are token ids")] = None
    structured_outputs: Annotated[
        dict[str, msgspec.Raw] | None,
        translated_field("json, regex, choice, grammar (Lark, GBNF), json_object, structural_tag"),
    ] = None
    thinking_token_budget: Annotated[
        int | None, supported("maximum number of reasoning tokens; -1 for no limit")
    ] = None
    priority: Annotated[int | None, supported("smaller values are scheduled first")] = None
    request_id: Annotated[
        str | None, supported("the answer's id is derived from this id; also the header X-Request-Id")
    ] = None
    cache_salt: Annotated[str | None, supported("requests with different salts share no cache entries")] = (
        None
    )
    deadline_s: Annotated[
        Seconds | None, supported("seconds after which the request is aborted with 504")
    ] = None
    mm_processor_kwargs: Annotated[
        ItemOptions | None,
        translated_field(
            "min_pixels, max_pixels, fps and other options of one item, clamped to the server's limits"
        ),
    ] = None


class Body(SharedBody, frozen=True, kw_only=True):
    """Fields that chat completions and completions share."""

    n: Annotated[int | None, _OPENAI] = None
    stream_options: Annotated[
        StreamOptions | None,
        supported("include_usage, continuous_usage_stats, include_obfuscation (default: false)"),
    ] = None
    response_format: Annotated[
        dict[str, msgspec.Raw] | None,
        supported(
            "text, json_object, json_schema, structural_tag; bounds, on_truncation, field_confidence, boxes"
        ),
    ] = None


class ChatBody(Body, frozen=True, kw_only=True):
    messages: Annotated[
        Messages,
        supported(
            "text, image_url (data: URLs, or fetched; detail, min_pixels, max_pixels), video_url; tool calls "
            "and tool results"
        ),
    ]
    max_completion_tokens: Annotated[
        int | None, supported("default: the rest of the context; takes precedence over max_tokens")
    ] = None
    max_tokens: Annotated[int | None, supported("OpenAI's older name of max_completion_tokens")] = None
    logprobs: Annotated[bool | None, _OPENAI] = None
    top_logprobs: Annotated[int | None, supported("0 to 20; requires logprobs")] = None
    continue_final_message: Annotated[bool | None, supported("the answer continues the last message")] = None
    add_generation_prompt: Annotated[bool | None, _VLLM] = None
    chat_template_kwargs: Annotated[Json | None, TEMPLATE] = None
    tools: Annotated[list[Json] | None, FUNCTIONS] = None
    tool_choice: Annotated[
        str | Json | None,
        supported("none (the prompt shows no tool), auto, required, a named function, allowed_tools"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, ONE_CALL] = None
    include_reasoning: Annotated[bool | None, SHOW_REASONING] = None
    thinking_budget: Annotated[int | None, translated_field("another name of thinking_token_budget")] = None
    reasoning_effort: Annotated[
        str | None, translated_field("none: a thinking_token_budget of 0; otherwise the model decides")
    ] = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]],
        supported("a text, a list of texts, token ids, or a list of token id lists"),
    ]
    max_tokens: Annotated[int | None, supported("default: 16, as in OpenAI's API; 0 with echo")] = None
    logprobs: Annotated[int | None, supported("a number, 0 to 20")] = None
    echo: Annotated[
        bool | None,
        supported("with logprobs: the prompt's logprobs too; with max_tokens 0: the prompt alone"),
    ] = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """The /tokenize body. Exactly one of `prompt` and `messages` is required."""

    model: Annotated[str | None, MODEL] = None
    prompt: Annotated[str | None, supported("a text")] = None
    messages: Annotated[
        Messages | None, supported("instead of a prompt; as in chat, without images and videos")
    ] = None
    add_generation_prompt: Annotated[bool | None, _CHAT] = None
    continue_final_message: Annotated[bool | None, _CHAT] = None
    chat_template_kwargs: Annotated[Json | None, _CHAT] = None
    tools: Annotated[list[Json] | None, _CHAT] = None
    return_token_strs: Annotated[bool | None, _VLLM] = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: Annotated[list[int], supported("a list of token ids")]
    model: Annotated[str | None, MODEL] = None

"""What becomes of each field of a body of /v1/messages, and of the blocks in it."""

from mmengine.server.http.body_fields import CHAT, Field, Fields
from mmengine.server.messages.body import AS_CHAT

_CHATS = {field.name: field for field in CHAT}
_REFUSED = (
    *("allowed_token_ids", "bad_words", "logits_processors", "skip_special_tokens", "kv_transfer_params"),
    *("vllm_xargs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template"),
)
_CACHED = "prefixes are found by their content, and stay as long as there is room"
_FORM = "use output_config.format"

_CONVERSED = (
    Field(
        "messages",
        "taken",
        "of user, assistant and system; blocks text, image, tool_use, tool_result, thinking; turns of one "
        "role in a row are one, and a last one of the assistant is gone on with",
    ),
    Field("system", "taken", "a text, or blocks of text"),
    Field("tools", "taken", "of the type custom; the model's chat template must know of tools"),
    Field("tool_choice", "taken", "auto, any, tool, none; disable_parallel_tool_use: one call at most"),
    Field(
        "thinking",
        "translated",
        "enabled: budget_tokens as thinking_token_budget; adaptive: the model decides; disabled, or left "
        "out: a budget of 0, where the model reasons at all; display omitted: counted, and not shown",
    ),
    Field("output_config", "taken", "format: json_schema, with bounds and on_truncation; effort is ignored"),
    Field("cache_control", "ignored", _CACHED),
    Field("user_profile_id", "ignored", "not kept"),
    Field("workspace_id", "ignored", "not kept"),
    Field("speed", "refused", "there is one; priority orders requests", ("standard",)),
)
MESSAGES = (
    *_CONVERSED,
    Field("max_tokens", "taken", "thinking included; left out: what the context leaves"),
    Field("stop_sequences", "taken", "stop_reason is stop_sequence behind one"),
    Field("stop", "translated", "chat's name of stop_sequences"),
    *(_CHATS[name] for name in (*AS_CHAT, "thinking_token_budget", "chat_template_kwargs")),
    Field("metadata", "ignored", "not kept"),
    Field("inference_geo", "ignored", "it is here"),
    Field("diagnostics", "ignored", "nothing is told of caches but cache_read_input_tokens"),
    Field(
        "service_tier", "refused", "there is one tier; priority orders requests", ("auto", "standard_only")
    ),
    Field("container", "refused", "no code is run"),
    Field("mcp_servers", "refused", "tools are called by the caller", ([],)),
    Field("context_management", "refused", "nothing is compacted; send fewer messages"),
    Field("n", "refused", "a message is one answer; use /v1/chat/completions", (1,)),
    Field("logprobs", "refused", "use /v1/chat/completions", (False,)),
    Field("max_completion_tokens", "refused", "use max_tokens"),
    Field("response_format", "refused", _FORM),
    Field("output_format", "refused", _FORM),
    Field("json_schema", "refused", _FORM),
    Field("reasoning_effort", "refused", "use thinking"),
    Field("parallel_tool_calls", "refused", "use tool_choice.disable_parallel_tool_use", (True,)),
    *(_CHATS[name] for name in _REFUSED),
)
COUNT_TOKENS = (
    *_CONVERSED,
    *(_CHATS[name] for name in ("model", "mm_processor_kwargs", "chat_template_kwargs")),
)
FIELDS, COUNT_FIELDS = Fields(MESSAGES), Fields(COUNT_TOKENS)

# Of each kind of block, and of a tool: what is read, and what is ignored. No other field is taken.
BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ("cache_control", "citations")),
    "image": (("source", "min_pixels", "max_pixels"), ("cache_control", "transformations")),
    "tool_use": (("id", "name", "input"), ("cache_control", "caller", "toolset_name")),
    "tool_result": (("tool_use_id", "content"), ("cache_control", "is_error", "toolset_name")),
    "thinking": (("thinking",), ("signature",)),
    "redacted_thinking": ((), ("data",)),
    "custom": (
        ("name", "description", "input_schema", "strict"),
        ("cache_control", "eager_input_streaming", "input_examples", "allowed_callers", "defer_loading"),
    ),
}

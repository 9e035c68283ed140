"""Tables of the body fields for /v1/messages and /v1/messages/count_tokens, and of the fields of content
blocks.
"""

from mmengine.server.chat.field_tables import CHAT
from mmengine.server.http.body_fields import Field, Fields, fields_of
from mmengine.server.messages.body import CountBody, MessagesBody

_CHAT = {field.name: field for field in CHAT}
_REFUSED_AS_IN_CHAT = (
    *("allowed_token_ids", "bad_words", "logits_processors", "skip_special_tokens", "kv_transfer_params"),
    *("vllm_xargs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template"),
)
_FORM = "use output_config.format"
_SHARED = (
    Field("cache_control", "ignored", "prefixes are matched by content, and stay as long as there is room"),
    Field("user_profile_id", "ignored", "not stored"),
    Field("workspace_id", "ignored", "not stored"),
    Field("speed", "optional", "there is one speed; use priority", ("standard",)),
    Field("mcp_servers", "optional", "only the caller runs tools", ([],)),
)
MESSAGES = (
    *fields_of(MessagesBody),
    *_SHARED,
    Field("metadata", "ignored", "not stored"),
    Field("inference_geo", "ignored", "all computation stays on this server"),
    Field("diagnostics", "ignored", "cache_read_input_tokens is the only report about caches"),
    Field("service_tier", "optional", "there is one tier; use priority", ("auto", "standard_only")),
    Field("container", "optional", "the server runs no code"),
    Field("n", "refused", "a message is one answer; use /v1/chat/completions", (1,)),
    Field("logprobs", "refused", "use /v1/chat/completions", (False,)),
    Field("max_completion_tokens", "refused", "use max_tokens"),
    Field("response_format", "refused", _FORM),
    Field("output_format", "refused", _FORM),
    Field("json_schema", "refused", _FORM),
    Field("reasoning_effort", "refused", "use thinking"),
    Field("parallel_tool_calls", "refused", "use tool_choice.disable_parallel_tool_use", (True,)),
    *(_CHAT[name] for name in _REFUSED_AS_IN_CHAT),
)
COUNT_TOKENS = (*fields_of(CountBody), *_SHARED)
FIELDS, COUNT_FIELDS = Fields(MESSAGES), Fields(COUNT_TOKENS)

# Maps each block type to its supported fields and its ignored fields. The type "custom" is a tool definition.
# All other fields are refused.
BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ("cache_control", "citations")),
    "image": (("source", "min_pixels", "max_pixels"), ("cache_control", "transformations")),
    "tool_use": (("id", "name", "input"), ("cache_control", "caller", "toolset_name")),
    "tool_result": (("tool_use_id", "content"), ("cache_control", "is_error", "toolset_name")),
    "document": (("source", "title", "context", "citations"), ("cache_control",)),
    "search_result": (("source", "title", "content", "citations"), ("cache_control",)),
    "thinking": (("thinking",), ("signature",)),
    "redacted_thinking": ((), ("data",)),
    "custom": (
        ("name", "description", "input_schema", "strict"),
        ("cache_control", "eager_input_streaming", "input_examples", "allowed_callers", "defer_loading"),
    ),
}

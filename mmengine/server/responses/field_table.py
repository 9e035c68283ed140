"""The table of the body fields for /v1/responses: which fields are supported, ignored or refused."""

from mmengine.server.chat.field_tables import CHAT
from mmengine.server.http.body_fields import Field, Fields, fields_of
from mmengine.server.responses.body import ResponsesBody

_CHAT = {field.name: field for field in CHAT}
_REFUSED_AS_IN_CHAT = (
    *("prompt_cache_retention", "prompt_cache_options"),
    *("allowed_token_ids", "bad_words", "logits_processors", "skip_special_tokens", "kv_transfer_params"),
    *("vllm_xargs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template"),
    "rid",
)
_FORM = "use text.format"
_LENGTH = "use max_output_tokens"

RESPONSES = (
    *fields_of(ResponsesBody),
    *(_CHAT[name] for name in _REFUSED_AS_IN_CHAT),
    *(_CHAT[name]._replace(how="optional") for name in ("service_tier", "moderation")),
    Field("client_metadata", "optional", "not stored; use metadata"),
    Field("truncation", "optional", "input is never truncated; send a shorter input", ("disabled",)),
    Field("conversation", "refused", "conversations are not stored; use previous_response_id"),
    Field("prompt", "refused", "the server has no prompt templates; send instructions and input"),
    Field("background_options", "optional", "use priority"),
    Field("access_programs", "optional", "the server has no access programs"),
    Field("image", "optional", "the server generates no images"),
    Field("n", "refused", "a response is one answer; use /v1/chat/completions", (1,)),
    Field("messages", "refused", "use input, or /v1/chat/completions"),
    Field("response_format", "refused", _FORM),
    Field("json_schema", "refused", _FORM),
    Field("verbosity", "refused", "use text.verbosity"),
    Field("reasoning_effort", "refused", "use reasoning.effort"),
    Field("logprobs", "refused", 'use include: ["message.output_text.logprobs"]', (False,)),
    Field("max_tokens", "refused", _LENGTH),
    Field("max_completion_tokens", "refused", _LENGTH),
    Field("max_new_tokens", "refused", _LENGTH),
    Field("functions", "refused", "use tools", ([],)),
    Field("function_call", "refused", "use tool_choice", ("none", "auto")),
)
FIELDS = Fields(RESPONSES)

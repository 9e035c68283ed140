"""What becomes of each field of a body of /v1/responses."""

from mmengine.server.http.body_fields import CHAT, Field, Fields
from mmengine.server.responses.body import AS_CHAT

_CHATS = {field.name: field for field in CHAT}
_AS_CHATS = (
    *AS_CHAT,
    *("prompt_cache_retention", "prompt_cache_options", "service_tier"),
    *("allowed_token_ids", "bad_words", "logits_processors", "skip_special_tokens", "kv_transfer_params"),
    *("vllm_xargs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template"),
    *("moderation", "rid"),
)
_FORM = "use text.format"
_LENGTH = "use max_output_tokens"

RESPONSES = (
    Field(
        "input",
        "taken",
        "a text, or items: messages of input_text, input_image (image_url or file_id, detail, min_pixels, "
        "max_pixels), input_video, output_text and refusal; function_call, function_call_output, reasoning",
    ),
    Field("instructions", "taken", "a system message before all; not carried over to the next response"),
    Field("previous_response_id", "taken", "its input and its output stand before this input"),
    Field("tools", "taken", "functions; the model's chat template must know of tools"),
    Field("tool_choice", "taken", "none (no tool is shown), auto, required, a function, allowed_tools"),
    Field("max_output_tokens", "taken", "reasoning included; left out: what the context leaves"),
    Field("max_tool_calls", "taken", "repeated: it counts calls of built-in tools, and there are none"),
    Field(
        "text",
        "taken",
        "format: text, json_object, json_schema, structural_tag, with bounds and on_truncation; verbosity is "
        "repeated",
    ),
    Field(
        "reasoning",
        "translated",
        "effort none: a thinking_token_budget of 0, else the model decides; nothing is summarized, reasoning "
        "stands in its items as it is",
    ),
    Field("top_logprobs", "taken", "0 to 20, with include message.output_text.logprobs"),
    Field(
        "include",
        "taken",
        "message.output_text.logprobs; reasoning.encrypted_content adds nothing, as reasoning is open",
    ),
    Field("metadata", "taken", "up to 16 names of 64 characters, each with a text of 512"),
    Field("store", "taken", "left out: true; false with background is refused"),
    Field("background", "taken", "the answer goes on without its caller"),
    Field("stream_options", "taken", "include_obfuscation false"),
    Field("user", "taken", "repeated, up to 256 characters"),
    Field("safety_identifier", "taken", "repeated, up to 128 characters"),
    Field("prompt_cache_key", "taken", "repeated, up to 256 characters; prefixes are found by their content"),
    *(_CHATS[name] for name in _AS_CHATS),
    Field("truncation", "refused", "no input is cut; send a shorter one", ("disabled",)),
    Field("conversation", "refused", "conversations are not kept; use previous_response_id"),
    Field("prompt", "refused", "there are no templates of prompts; send instructions and input"),
    Field("context_management", "refused", "nothing is compacted; send a shorter input", ([],)),
    Field("background_options", "refused", "priority orders requests"),
    Field("access_programs", "refused", "there are none"),
    Field("image", "refused", "no images are made"),
    Field("n", "refused", "a response is one answer; use /v1/chat/completions", (1,)),
    Field("messages", "refused", "use input, or /v1/chat/completions"),
    Field("response_format", "refused", _FORM),
    Field("json_schema", "refused", _FORM),
    Field("verbosity", "refused", "use text.verbosity"),
    Field("reasoning_effort", "refused", "use reasoning.effort"),
    Field("logprobs", "refused", "use include message.output_text.logprobs", (False,)),
    Field("max_tokens", "refused", _LENGTH),
    Field("max_completion_tokens", "refused", _LENGTH),
    Field("max_new_tokens", "refused", _LENGTH),
    Field("functions", "refused", "use tools", ([],)),
    Field("function_call", "refused", "use tool_choice", ("none", "auto")),
)
FIELDS = Fields(RESPONSES)

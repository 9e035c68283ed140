"""Tables of the body fields for chat completions, completions and tokenization: which fields are supported,
ignored or refused.
"""

from mmengine.server.chat.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from mmengine.server.http.body_fields import Field, fields_of

_FORM = "use response_format or structured_outputs"
_BEAMS = "beam search is not supported; use n"
_LENGTH = "use max_completion_tokens, or max_tokens for /v1/completions"
_SPECIAL = "special tokens are never returned"
_CACHE_ROOM = "cached prefixes stay as long as there is room"

_SHARED = (
    Field("user", "ignored", "not stored"),
    Field("safety_identifier", "ignored", "not stored"),
    Field("metadata", "ignored", "not stored"),
    Field("prompt_cache_key", "ignored", "prefixes are matched by content; cache_salt keeps requests apart"),
    Field("prompt_cache_retention", "ignored", _CACHE_ROOM),
    Field("prompt_cache_options", "ignored", _CACHE_ROOM),
    Field("service_tier", "refused", "there is one tier; use priority", ("auto", "default")),
    Field("best_of", "refused", "use n", (1,)),
    Field("use_beam_search", "refused", _BEAMS, (False,)),
    Field("length_penalty", "refused", _BEAMS, (1, 1.0)),
    Field("early_stopping", "refused", _BEAMS, (False,)),
    Field("prompt_logprobs", "refused", "use /v1/completions with echo and logprobs"),
    Field("truncate_prompt_tokens", "refused", "prompts are never truncated; send a shorter prompt"),
    Field("allowed_token_ids", "refused", "use structured_outputs.choice or .regex"),
    Field("bad_words", "refused", "use logit_bias"),
    Field("logits_processors", "refused", "the server runs no code of callers; use logit_bias"),
    Field("skip_special_tokens", "refused", _SPECIAL, (True,)),
    Field("spaces_between_special_tokens", "refused", _SPECIAL, (True, False)),
    Field("include_stop_str_in_output", "refused", "the text ends before its stop string", (False,)),
    Field("return_token_ids", "refused", "use /tokenize", (False,)),
    Field("return_tokens_as_token_ids", "refused", "use /tokenize", (False,)),
    Field("kv_transfer_params", "refused", "KV blocks stay with this engine"),
    Field("vllm_xargs", "refused", "there are no further options"),
    Field("guided_json", "refused", "use structured_outputs.json"),
    Field("guided_regex", "refused", "use structured_outputs.regex"),
    Field("guided_choice", "refused", "use structured_outputs.choice"),
    Field("guided_grammar", "refused", "use structured_outputs.grammar"),
    Field("guided_decoding_backend", "refused", "the server's setting grammar_backend decides"),
    Field("guided_whitespace_pattern", "refused", "use response_format.bounds"),
    Field("json_schema", "refused", _FORM),
    Field("schema", "refused", _FORM),
    Field("regex", "refused", "use structured_outputs.regex"),
    Field("ebnf", "refused", "use structured_outputs.grammar"),
    Field("grammar", "refused", "use structured_outputs.grammar"),
    Field("max_new_tokens", "refused", _LENGTH),
    Field("n_predict", "refused", _LENGTH),
    Field("stop_sequences", "refused", "use stop"),
    Field("rid", "refused", "use request_id"),
)
CHAT = (
    *fields_of(ChatBody),
    *_SHARED,
    Field("verbosity", "ignored", "the model decides"),
    Field("functions", "refused", "deprecated by OpenAI; use tools", ([],)),
    Field("function_call", "refused", "deprecated by OpenAI; use tool_choice", ("none", "auto")),
    Field("store", "refused", "chat completions are not stored; use /v1/responses", (False,)),
    Field("modalities", "refused", "answers are text", (["text"],)),
    Field("audio", "refused", "answers are text"),
    Field("prediction", "refused", "the engine makes its own drafts (--spec)"),
    Field("web_search_options", "refused", "the server has no web search"),
    Field("moderation", "refused", "the server has no moderation"),
    Field("chat_template", "refused", "the server's template is used (--chat-template)"),
    Field("documents", "refused", "use chat_template_kwargs"),
    Field("echo", "refused", "use /v1/completions", (False,)),
    Field("add_special_tokens", "refused", "the chat template writes special tokens", (False,)),
)
COMPLETION = (
    *fields_of(CompletionBody),
    *_SHARED,
    Field("suffix", "refused", "the model only continues the prompt", ("",)),
    Field("messages", "refused", "use /v1/chat/completions"),
    Field("add_special_tokens", "refused", "the prompt is used as sent", (True, False)),
)
TOKENIZE = (
    *fields_of(TokenizeBody),
    Field("add_special_tokens", "refused", "the prompt is used as sent", (True, False)),
    Field("chat_template", "refused", "the server's template is used (--chat-template)"),
    Field("mm_processor_kwargs", "refused", "images and videos are not tokenized here"),
)
DETOKENIZE = fields_of(DetokenizeBody)

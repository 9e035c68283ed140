"""What becomes of each field of a body: the table that the server obeys and docs/reference/http.md shows."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from mmengine.errors import FIELD, ErrorCode, shown
from mmengine.server.http.errors import ApiError, decoded

MAX_FIELDS = 256
DROPPED_HEADER = "x-mmengine-ignored-fields"
_MAX_DROPPED_CHARS = 1000
_NULL = b"null"
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_value = msgspec.json.Decoder().decode


class Field(NamedTuple):
    """`says`: of a field that is refused, what to do instead; of others what it means here. `neutral`: values
    with which a field that is refused asks for nothing, and is taken."""

    name: str
    how: Literal["taken", "translated", "ignored", "refused"]
    says: str
    neutral: tuple[object, ...] = ()


def _taken(says: str, *names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "taken", says) for name in names)


_FORM = "give response_format or structured_outputs"

_MODEL = Field("model", "taken", "one of the served names; left out: the first of them")
_ADD_SPECIAL = Field("add_special_tokens", "refused", "the prompt is taken as it is", (True, False))

_BOTH = (
    _MODEL,
    *_taken("as OpenAI's", "temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "stream"),
    *_taken("as vLLM's", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos"),
    Field("top_k", "translated", "0 and -1 are off"),
    Field("seed", "translated", "of 63 bits: a negative one is another number; left out: drawn"),
    Field(
        "stop",
        "translated",
        "a string or a list; beside a form: length where that is not complete before it, or it is closed",
    ),
    Field("logit_bias", "translated", "token ids as keys"),
    Field("stream_options", "taken", "include_usage, continuous_usage_stats"),
    Field(
        "response_format", "taken", "text, json_object, json_schema, structural_tag; bounds, on_truncation"
    ),
    Field(
        "structured_outputs",
        "translated",
        "json, regex, choice, grammar (Lark, GBNF), json_object, structural_tag",
    ),
    Field("thinking_token_budget", "taken", "tokens that may be reasoning, then it is ended; -1: no bound"),
    Field("priority", "taken", "smaller is more important"),
    Field("request_id", "taken", "the answer's id is made of it; also as the header X-Request-Id"),
    Field("cache_salt", "taken", "answers with another one share no cache"),
    Field("deadline_s", "taken", "seconds after which it is given up, with 504"),
    Field("mm_processor_kwargs", "translated", "min_pixels, max_pixels, fps and others of one item, clamped"),
    Field("user", "ignored", "not kept"),
    Field("safety_identifier", "ignored", "not kept"),
    Field("metadata", "ignored", "not kept"),
    Field("prompt_cache_key", "ignored", "prefixes are found by their content; cache_salt keeps them apart"),
    Field("prompt_cache_retention", "ignored", "prefixes stay as long as there is room"),
    Field("prompt_cache_options", "ignored", "prefixes stay as long as there is room"),
    Field("service_tier", "refused", "there is one tier; priority orders requests", ("auto", "default")),
    Field("best_of", "refused", "use n", (1,)),
    Field("use_beam_search", "refused", "beams are not done; use n", (False,)),
    Field("length_penalty", "refused", "it belongs to beams, which are not done", (1, 1.0)),
    Field("early_stopping", "refused", "it belongs to beams, which are not done", (False,)),
    Field("prompt_logprobs", "refused", "use /v1/completions with echo and logprobs"),
    Field("truncate_prompt_tokens", "refused", "no prompt is cut; send a shorter one"),
    Field("allowed_token_ids", "refused", "use structured_outputs.choice or .regex"),
    Field("bad_words", "refused", "use logit_bias"),
    Field("logits_processors", "refused", "code of callers is not run; use logit_bias"),
    Field("skip_special_tokens", "refused", "special tokens are never shown", (True,)),
    Field("spaces_between_special_tokens", "refused", "special tokens are never shown", (True, False)),
    Field("include_stop_str_in_output", "refused", "the text ends before its stop string", (False,)),
    Field("return_token_ids", "refused", "use /tokenize", (False,)),
    Field("return_tokens_as_token_ids", "refused", "use /tokenize", (False,)),
    Field("kv_transfer_params", "refused", "KV stays with this engine"),
    Field("vllm_xargs", "refused", "there are no further options"),
    Field("guided_json", "refused", "use structured_outputs.json"),
    Field("guided_regex", "refused", "use structured_outputs.regex"),
    Field("guided_choice", "refused", "use structured_outputs.choice"),
    Field("guided_grammar", "refused", "use structured_outputs.grammar"),
    Field("guided_decoding_backend", "refused", "the server's grammar_backend decides"),
    Field("guided_whitespace_pattern", "refused", "use response_format.bounds"),
    Field("json_schema", "refused", _FORM),
    Field("schema", "refused", _FORM),
    Field("regex", "refused", "use structured_outputs.regex"),
    Field("ebnf", "refused", "use structured_outputs.grammar"),
    Field("grammar", "refused", "use structured_outputs.grammar"),
    Field("max_new_tokens", "refused", "use max_completion_tokens, or max_tokens for /v1/completions"),
    Field("n_predict", "refused", "use max_completion_tokens, or max_tokens for /v1/completions"),
    Field("stop_sequences", "refused", "use stop"),
    Field("rid", "refused", "use request_id"),
)

CHAT = (
    Field(
        "messages",
        "taken",
        "text, image_url (data: URLs, or fetched; detail, min_pixels, max_pixels), video_url; calls and "
        "results of tools",
    ),
    *_BOTH,
    Field("max_completion_tokens", "taken", "left out: what the context leaves; wins over max_tokens"),
    Field("max_tokens", "taken", "OpenAI's older name of max_completion_tokens"),
    Field("logprobs", "taken", "as OpenAI's"),
    Field("top_logprobs", "taken", "0 to 20, with logprobs"),
    Field("continue_final_message", "taken", "the answer goes on with the last message"),
    Field("add_generation_prompt", "taken", "as vLLM's"),
    Field("chat_template_kwargs", "taken", "variables of the chat template, as enable_thinking"),
    Field("reasoning_effort", "translated", "none: a thinking_token_budget of 0; else the model decides"),
    Field("thinking_budget", "translated", "another name of thinking_token_budget"),
    Field("verbosity", "ignored", "the model decides"),
    Field("tools", "taken", "functions; the model's chat template must know of tools"),
    Field("tool_choice", "taken", "none (no tool is shown), auto, required, a named function, allowed_tools"),
    Field("parallel_tool_calls", "taken", "false: the answer ends with its first call"),
    Field("functions", "refused", "deprecated by OpenAI", ([],)),
    Field("function_call", "refused", "deprecated by OpenAI", ("none", "auto")),
    Field("store", "refused", "answers are not kept", (False,)),
    Field("modalities", "refused", "answers are text", (["text"],)),
    Field("audio", "refused", "answers are text"),
    Field("prediction", "refused", "drafts come from the engine (--spec)"),
    Field("web_search_options", "refused", "nothing is searched"),
    Field("moderation", "refused", "nothing is moderated"),
    Field("chat_template", "refused", "templates are the server's (--chat-template)"),
    Field("documents", "refused", "use chat_template_kwargs"),
    Field("include_reasoning", "taken", "false: reasoning is counted, and not shown"),
    Field("echo", "refused", "use /v1/completions", (False,)),
    Field("add_special_tokens", "refused", "the chat template writes them", (False,)),
)

COMPLETION = (
    Field("prompt", "taken", "a text, a list of texts, token ids, or a list of lists of those"),
    *_BOTH,
    Field("max_tokens", "taken", "left out: 16, as OpenAI's; 0 with echo"),
    Field("logprobs", "taken", "a number, 0 to 20"),
    Field("echo", "taken", "with logprobs also those of the prompt; with max_tokens 0 the prompt alone"),
    Field("suffix", "refused", "text is not filled in", ("",)),
    Field("messages", "refused", "use /v1/chat/completions"),
    _ADD_SPECIAL,
)

TOKENIZE = (
    Field("prompt", "taken", "a text"),
    Field("messages", "taken", "in place of a prompt; as those of chat, without images and videos"),
    _MODEL,
    *_taken("as that of chat", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    Field("tools", "taken", "as those of chat"),
    Field("return_token_strs", "taken", "as vLLM's"),
    _ADD_SPECIAL,
    Field("chat_template", "refused", "templates are the server's (--chat-template)"),
    Field("mm_processor_kwargs", "refused", "images and videos are not tokenized here"),
)

DETOKENIZE = (Field("tokens", "taken", "a list of token ids"), _MODEL)


class Fields:
    """A table by name."""

    def __init__(self, fields: Iterable[Field]):
        self.by_name = {field.name: field for field in fields}
        self._usable = [field.name for field in self.by_name.values() if field.how != "refused"]
        self.names = frozenset(self._usable)

    def check(self, body: bytes, *, ignore_unknown: bool) -> list[str]:
        """Raise ApiError for the first field that is not taken. Gives the unknown names that were ignored."""
        return self.check_given(decoded(body, _decode), ignore_unknown=ignore_unknown)

    def check_given(self, given: Mapping[str, msgspec.Raw], *, ignore_unknown: bool) -> list[str]:
        """`check` of a body that was read."""
        if len(given) > MAX_FIELDS:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"the body has {len(given)} fields; at most {MAX_FIELDS} are taken"
            )
        ignored = []
        for name, raw in given.items():
            field = self.by_name.get(name)
            if len(raw) == len(_NULL) and bytes(raw) == _NULL:  # a copy of a large one takes long
                continue
            if field is None:
                if not ignore_unknown:
                    raise self._unknown(name)
                ignored.append(name)
            elif field.how == "refused":
                self._refuse(field, raw)
        return ignored

    def _refuse(self, field: Field, raw: msgspec.Raw) -> None:
        if field.neutral and len(raw) <= 64:
            value = decoded(raw, _decode_value)  # a Raw may hold what is no UTF-8, or no number
            if any(type(value) is type(one) and value == one for one in field.neutral):
                return
        raise ApiError(ErrorCode.UNSUPPORTED_FIELD, f"{FIELD} is not supported; {field.says}", field.name)

    def _unknown(self, name: str) -> ApiError:
        near = difflib.get_close_matches(name[:64], self._usable, 1)
        hint = f"; did you mean {near[0]}?" if near else "; leave it out"
        return ApiError(ErrorCode.UNKNOWN_FIELD, f"unknown field {shown(name)}{hint}", name[:64])


def dropped_header(names: Sequence[str]) -> dict[str, str]:
    """Which tells of unknown fields that were ignored, if any were."""
    shown_names = ", ".join(name for name in names if name.isascii() and name.isprintable())
    return {DROPPED_HEADER: shown_names[:_MAX_DROPPED_CHARS]} if names else {}

"""Bodies of /tokenize and /detokenize, with vLLM's names."""

import msgspec

from mmengine.server.asked import Json


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # prompts are taken as they are
    return_token_strs: bool | None = None
    chat_template_kwargs: Json | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None

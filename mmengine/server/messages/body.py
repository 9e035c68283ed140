"""The bodies of /v1/messages and /v1/messages/count_tokens, as their tables say they are taken."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mmengine.server.chat.parsed_request import Json, SharedBody

Turns = Annotated[list[Json], Meta(min_length=1)]


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`display` omitted: it is counted, and not shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`effort`: the model decides."""

    format: dict[str, msgspec.Raw] | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessagesBody(SharedBody, frozen=True, kw_only=True):
    """None: left out, or null."""

    messages: Turns
    system: str | list[Json] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Json | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """What of a message's body its number of tokens depends on."""

    messages: Turns
    model: str | None = None
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mm_processor_kwargs: Json | None = None
    chat_template_kwargs: Json | None = None

    def whole(self) -> MessagesBody:
        return MessagesBody(**{name: getattr(self, name) for name in self.__struct_fields__})


AS_CHAT = tuple(
    name for name in SharedBody.__struct_fields__ if name not in ("stop", "thinking_token_budget")
)
decode = msgspec.json.Decoder(MessagesBody).decode
decode_count = msgspec.json.Decoder(CountBody).decode

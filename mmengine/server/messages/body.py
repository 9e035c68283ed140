"""The structs that declare the bodies of /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mmengine.server.chat.bodies import MODEL, TEMPLATE, SharedBody
from mmengine.server.http.body_fields import supported, translated_field
from mmengine.server.http.errors import Json

Turns = Annotated[list[Json], Meta(min_length=1)]


class Thinking(msgspec.Struct, frozen=True):
    """The field `thinking`. With `display` "omitted", reasoning tokens are counted but not returned."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """The field `output_config`. `effort` has no effect, because the model decides how long to reason."""

    format: dict[str, msgspec.Raw] | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


_TURNS = supported(
    "turns of user, assistant and system; blocks text, image, document (text), search_result, tool_use, "
    "tool_result, thinking; consecutive turns of one role are joined; if the last turn is the "
    "assistant's, the answer continues it"
)
_SYSTEM = supported("a text, or blocks of text")
_TOOLS = supported("tools of type custom; requires a chat template that supports tools")
_CHOICE = supported("auto, any, tool, none; disable_parallel_tool_use: one call at most")
_THINKING = translated_field(
    "enabled: budget_tokens becomes thinking_token_budget; adaptive: the model decides; disabled or absent: "
    "a budget of 0, for a model that reasons; display omitted: reasoning is counted but not returned"
)
_OUTPUT = supported(
    "format: json_schema, with bounds, on_truncation, field_confidence, boxes; effort is ignored"
)
_EDITS = supported("edits that remove nothing from the messages")
_ITEMS = translated_field(
    "min_pixels, max_pixels, fps and other options of one item, clamped to the server's limits"
)


class MessagesBody(SharedBody, frozen=True, kw_only=True):
    """The /v1/messages body. None means that the field is absent or null."""

    messages: Annotated[Turns, _TURNS]
    system: Annotated[str | list[Json] | None, _SYSTEM] = None
    max_tokens: Annotated[int | None, supported("includes thinking; default: the rest of the context")] = None
    stop: Annotated[str | list[str] | None, translated_field("chat's name of stop_sequences")] = None
    stop_sequences: Annotated[list[str] | None, supported("a match sets stop_reason to stop_sequence")] = None
    tools: Annotated[list[Json] | None, _TOOLS] = None
    tool_choice: Annotated[Json | None, _CHOICE] = None
    thinking: Annotated[Thinking | None, _THINKING] = None
    output_config: Annotated[OutputConfig | None, _OUTPUT] = None
    context_management: Annotated[Json | None, _EDITS] = None
    chat_template_kwargs: Annotated[Json | None, TEMPLATE] = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """The /v1/messages/count_tokens body. Its fields determine the number of prompt tokens."""

    messages: Annotated[Turns, _TURNS]
    model: Annotated[str | None, MODEL] = None
    system: Annotated[str | list[Json] | None, _SYSTEM] = None
    tools: Annotated[list[Json] | None, _TOOLS] = None
    tool_choice: Annotated[Json | None, _CHOICE] = None
    thinking: Annotated[Thinking | None, _THINKING] = None
    output_config: Annotated[OutputConfig | None, _OUTPUT] = None
    context_management: Annotated[Json | None, _EDITS] = None
    mm_processor_kwargs: Annotated[Json | None, _ITEMS] = None
    chat_template_kwargs: Annotated[Json | None, TEMPLATE] = None

    def whole(self) -> MessagesBody:
        return MessagesBody(**{name: getattr(self, name) for name in self.__struct_fields__})


AS_CHAT = tuple(
    name for name in SharedBody.__struct_fields__ if name not in ("stop", "thinking_token_budget")
)
decode = msgspec.json.Decoder(MessagesBody).decode
decode_count = msgspec.json.Decoder(CountBody).decode

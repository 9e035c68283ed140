"""Converts a /v1/messages body to a chat body, and parses the chat body into a request."""

import re
from collections.abc import Sequence
from functools import partial

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.chat.bodies import ChatBody
from mmengine.server.chat.chat_reader import ChatReader
from mmengine.server.chat.parsed_request import Json, ParsedRequest
from mmengine.server.http.body_fields import Fields
from mmengine.server.http.errors import ApiError, decode_body
from mmengine.server.http.field_names import INDEX, FieldNames, Renames
from mmengine.server.http.media_payloads import MediaPayloads, in_data_fields, read_without_payloads
from mmengine.server.http.unsupported import Unsupported
from mmengine.server.messages.body import AS_CHAT, MessagesBody, OutputConfig, Thinking, decode, decode_count
from mmengine.server.messages.context_edits import check_context_management
from mmengine.server.messages.conversation import Conversation, check_fields
from mmengine.server.messages.field_table import COUNT_FIELDS, FIELDS

_VERSION = re.compile(r"20\d\d-\d\d-\d\d")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_RENAMES: Renames = (
    (("tools", INDEX, "function", "parameters"), ("tools", INDEX, "input_schema")),
    (("tools", INDEX, "function"), ("tools", INDEX)),
    (("tool_choice", "function"), ("tool_choice",)),
    (("response_format", "json_schema"), ("output_config", "format")),
    (("response_format",), ("output_config", "format")),
    (("max_completion_tokens",), ("max_tokens",)),
    (("stop",), ("stop_sequences",)),
)


def check_version(given: str) -> None:
    """Raise ApiError if the header anthropic-version is not a date. The date has no effect on the answer."""
    if given and not _VERSION.fullmatch(given):
        text = f"anthropic-version must be a date such as 2023-06-01, not {shown(given)}"
        raise ApiError(ErrorCode.INVALID_VALUE, text, "anthropic-version")


class MessagesReader:
    """Parses /v1/messages bodies. `chat`: parses the converted chat body. `is_lenient`: ignore unsupported
    parts of a body. `can_end_reasoning`: whether the model supports thinking budgets.
    """

    def __init__(
        self, chat: ChatReader, *, is_lenient: bool = False, ignore_unknown: bool, can_end_reasoning: bool
    ):
        self._chat, self._is_lenient, self._ignore_unknown = chat, is_lenient, ignore_unknown or is_lenient
        self._can_end_reasoning = can_end_reasoning

    def read(self, data: bytes, request_id: str) -> ParsedRequest:
        """Parse a body. Base64 media are decoded separately from the JSON. `request_id`: the id for a body
        without a request_id. Raises ApiError.
        """
        return read_without_payloads(data, partial(self._read, request_id=request_id), in_data_fields)

    def read_count(self, data: bytes, request_id: str) -> ParsedRequest:
        """Parse a /v1/messages/count_tokens body. Callers use only the request's prompt. Raises ApiError."""
        return read_without_payloads(data, partial(self._read_count, request_id=request_id), in_data_fields)

    def _read(self, data: bytes, payloads: MediaPayloads, request_id: str) -> ParsedRequest:
        ignored = self._ignored(FIELDS, data)
        return self._build_request(decode_body(data, decode), payloads, request_id, ignored)

    def _read_count(self, data: bytes, payloads: MediaPayloads, request_id: str) -> ParsedRequest:
        ignored = self._ignored(COUNT_FIELDS, data)
        return self._build_request(decode_body(data, decode_count).whole(), payloads, request_id, ignored)

    def _ignored(self, fields: Fields, data: bytes) -> list[str]:
        return fields.check(data, ignore_unknown=self._ignore_unknown, is_lenient=self._is_lenient)

    def _build_request(
        self, body: MessagesBody, payloads: MediaPayloads, request_id: str, ignored: list[str]
    ) -> ParsedRequest:
        if body.stop is not None and body.stop_sequences is not None:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"set {FIELD} or stop, not both", FieldPath("stop_sequences")
            )
        check_context_management(body.context_management, body.messages, self._chat.max_model_len)
        unsupported = Unsupported(ignored, is_lenient=self._is_lenient)
        conversation = Conversation(payloads, unsupported)
        if body.system is not None:
            conversation.add_instructions(body.system)
        conversation.add_input(body.messages)
        if not conversation.messages:
            text = f"{FIELD} contain no block that the model can read; add a user message"
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("messages"))
        tools = _tools(body.tools or (), unsupported)
        names = FieldNames(conversation.places, _RENAMES, media="source", tools=tuple(tools))
        chat = self._as_chat(body, conversation, list(tools.values()), unsupported)
        try:
            parsed_request = self._chat.parse("messages", chat, request_id, ignored)
        except ApiError as error:
            raise error.renamed(names.path) from None
        uploads = [each._replace(where=names.path(each.where) / "file_id") for each in parsed_request.uploads]
        envelope = msgspec.structs.replace(parsed_request.envelope, usage_frames="last")
        return msgspec.structs.replace(
            parsed_request, usage_frames="last", field_names=names, uploads=uploads, envelope=envelope
        )

    def _as_chat(
        self, body: MessagesBody, conversation: Conversation, tools: list[Json], unsupported: Unsupported
    ) -> ChatBody:
        """Return the equivalent chat body. Raises ApiError."""
        choice, parallel = _choice(body.tool_choice, unsupported)
        thinking = body.thinking or Thinking("disabled")
        budget = body.thinking_token_budget
        if budget is None:
            budget = self._budget(thinking)
        return ChatBody(
            messages=conversation.finished(),
            continue_final_message=conversation.continues_answer or None,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_form(body.output_config),
            max_completion_tokens=body.max_tokens,
            stop=body.stop if body.stop_sequences is None else body.stop_sequences,
            thinking_token_budget=budget,
            include_reasoning=thinking.display != "omitted",
            chat_template_kwargs=body.chat_template_kwargs,
            **{name: getattr(body, name) for name in AS_CHAT},
        )

    def _budget(self, thinking: Thinking) -> int | None:
        if thinking.type == "enabled":
            if thinking.budget_tokens is None:
                text = f"{FIELD} is required if the type is enabled; set it, or set the type to adaptive"
                raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("thinking", "budget_tokens"))
            return thinking.budget_tokens
        return 0 if thinking.type == "disabled" and self._can_end_reasoning else None


def _tools(tools: Sequence[Json], unsupported: Unsupported) -> dict[int, Json]:
    """Return the chat tools by their index in the body. A lenient server ignores tools that Anthropic defines
    or runs. Raises ApiError for an invalid tool, and if no tool is left.
    """
    found = {}
    for number, tool in enumerate(tools):
        where, kind = FieldPath("tools", number), tool.get("type")
        if kind in (None, "custom"):
            found[number] = _tool(where, tool, unsupported)
            continue
        text = f"{FIELD}={shown(kind)} is a tool of Anthropic's server; use tools of type custom"
        hosted = ApiError(ErrorCode.UNSUPPORTED_FIELD, text, where / "type")
        if not isinstance(kind, str) or len(tools) == 1:
            raise hosted
        unsupported.leave_out(hosted, kind)
    if tools and not found:
        text = f"{FIELD} contains only tools of Anthropic's server; use tools of type custom"
        raise ApiError(ErrorCode.UNSUPPORTED_FIELD, text, FieldPath("tools"))
    return found


def _tool(where: FieldPath, tool: Json, unsupported: Unsupported) -> Json:
    check_fields(where, tool, "custom", unsupported)
    if not isinstance(tool.get("input_schema"), dict):
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be an object", where / "input_schema")
    function: Json = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _choice(given: Json | None, unsupported: Unsupported) -> tuple[str | Json | None, bool | None]:
    """Return `tool_choice` and `parallel_tool_calls` for the chat body. Raises ApiError."""
    if given is None:
        return None, None
    kind, name = given.get("type"), given.get("name")
    taken = ("type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ()))
    for field in given:
        if field not in taken:
            place = FieldPath("tool_choice", field[:64])
            unsupported.leave_out(
                ApiError(ErrorCode.UNKNOWN_FIELD, f"{FIELD} is unknown; leave it out", place)
            )
    alone = given.get("disable_parallel_tool_use") or False
    if not isinstance(alone, bool):
        place = FieldPath("tool_choice", "disable_parallel_tool_use")
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be true or false, not {shown(alone)}", place)
    choices: dict[object, str | Json] = {"auto": "auto", "any": "required", "none": "none"}
    choices["tool"] = {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in choices:
        text = f"{FIELD} must be auto, any, tool or none, not {shown(kind)}"
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("tool_choice", "type"))
    return choices[kind], not alone


def _form(config: OutputConfig | None) -> dict[str, msgspec.Raw] | None:
    """Return `response_format` for the chat body. Schemas stay encoded, because they may be large."""
    form = config.format if config is not None else None
    if form is None or bytes(form.get("type", b"")) != b'"json_schema"':
        return form
    inner: dict[str, object] = {"name": "output"}
    inner |= {name: raw for name, raw in form.items() if name in _SCHEMA_FIELDS}
    outer = {name: raw for name, raw in form.items() if name not in _SCHEMA_FIELDS}
    return {**outer, "json_schema": msgspec.Raw(msgspec.json.encode(inner))}

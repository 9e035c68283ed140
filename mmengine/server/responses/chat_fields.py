"""Converts the tools and the answer format of a Responses body to chat fields, and to the fields that the
response object repeats.

The functions raise ApiError only for mistakes that the conversion would hide. The chat reader reports all
other mistakes.
"""

from collections.abc import Sequence

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.response_echo import NOTHING, PLAIN_TEXT, echo_json
from mmengine.server.http.errors import ApiError
from mmengine.server.http.unsupported import Unsupported
from mmengine.server.responses.body import TextOptions
from mmengine.server.responses.custom_tools import custom_tool

_OWN_KINDS = ("function", "custom")
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_encode = msgspec.json.encode


def chat_tools(tools: Sequence[Json], unsupported: Unsupported) -> dict[int, Json]:
    """Return the chat tools by their index in the client's body. On a lenient server, built-in tools of
    OpenAI and Codex are ignored.

    Raises ApiError for an invalid tool, and if `tools` has only built-in tools.
    """
    found = {}
    for n, tool in enumerate(tools):
        where, kind = FieldPath("tools", n), tool.get("type")
        if kind == "function":
            found[n] = _tool(where, tool, unsupported)
        elif kind == "custom":
            found[n] = custom_tool(where, tool, unsupported)
        else:
            text = f"{FIELD}={shown(kind)} is a tool of OpenAI's server; use tools of type function or custom"
            hosted = ApiError(ErrorCode.INVALID_VALUE, text, where / "type")
            if not isinstance(kind, str) or len(tools) == 1:
                raise hosted
            unsupported.leave_out(hosted, kind)
    if tools and not found:
        text = f"{FIELD} contains only tools of OpenAI's server; use tools of type function or custom"
        raise ApiError(ErrorCode.UNSUPPORTED_FIELD, text, FieldPath("tools"))
    return found


def _tool(where: FieldPath, tool: Json, unsupported: Unsupported) -> Json:
    if "function" in tool:
        text = f"{FIELD} has the format of chat completions; put name and parameters next to type"
        raise ApiError(ErrorCode.UNKNOWN_FIELD, text, where / "function")
    for name in tool:
        if name not in _TOOL_FIELDS:
            text = f"{FIELD} is unknown; use {', '.join(_TOOL_FIELDS)}"
            unsupported.leave_out(ApiError(ErrorCode.UNKNOWN_FIELD, text, where / name[:64]))
    function = {name: tool[name] for name in _TOOL_FIELDS[1:] if name in tool}
    return {"type": "function", "function": function}


def echo_tools(tools: Sequence[Json]) -> msgspec.Raw:
    """Return the tools as JSON for the response object. Each function has `parameters` and `strict`."""
    empty: Json = {"parameters": None, "strict": None}
    found = [{**empty, **tool} if tool.get("type") == "function" else tool for tool in tools]
    return echo_json(found, NOTHING)


def chat_choice(given: str | Json | None, unsupported: Unsupported) -> str | Json | None:
    """Convert `tool_choice` to the chat format, which has a tool's name in the inner object `function`. On a
    lenient server, OpenAI's built-in tools are removed from the allowed tools.
    """
    if not isinstance(given, dict):
        return given
    if given.get("type") == "allowed_tools":
        allowed = {name: value for name, value in given.items() if name != "type"}
        tools = allowed.get("tools")
        if isinstance(tools, list):
            kept = allowed_places(given)
            for n in sorted(set(range(len(tools))) - set(kept)):
                kind = tools[n]["type"]
                text = f"{FIELD}={shown(kind)} is a tool of OpenAI's server; leave the tool out"
                where = FieldPath("tool_choice", "tools", n, "type")
                unsupported.leave_out(ApiError(ErrorCode.INVALID_VALUE, text, where), kind)
            allowed["tools"] = [_chosen(tools[n]) if isinstance(tools[n], dict) else tools[n] for n in kept]
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _chosen(given)


def allowed_places(given: str | Json | None) -> tuple[int, ...]:
    """Return the indices, in the list of allowed tools, of all tools except OpenAI's built-in tools. If the
    list has no function and no custom tool, return all indices.
    """
    tools = given.get("tools") if isinstance(given, dict) else None
    listed = tools if isinstance(tools, list) else []
    kinds = [each.get("type") if isinstance(each, dict) else None for each in listed]
    if not any(kind in _OWN_KINDS for kind in kinds):
        return tuple(range(len(kinds)))
    return tuple(n for n, kind in enumerate(kinds) if kind in _OWN_KINDS or not isinstance(kind, str))


def _chosen(given: Json) -> Json:
    if given.get("type") == "custom":
        given = {**given, "type": "function"}
    if given.get("type") != "function" or "function" in given:
        return given
    return {"type": "function", "function": {name: each for name, each in given.items() if name != "type"}}


def chat_form(text: TextOptions | None) -> dict[str, msgspec.Raw] | None:
    """Return `response_format` for the chat body. A schema stays encoded, because it may be large. Raises
    ApiError.
    """
    form = text.format if text is not None else None
    if form is not None and "json_schema" in form:
        where = "text.format.json_schema"
        why = f"{FIELD} has the format of chat completions; put name and schema next to type"
        raise ApiError(ErrorCode.UNKNOWN_FIELD, why, where)
    if form is None or bytes(form.get("type", b"")) != b'"json_schema"':
        return form
    inner = {name: raw for name, raw in form.items() if name in _SCHEMA_FIELDS}
    outer = {name: raw for name, raw in form.items() if name not in _SCHEMA_FIELDS}
    return {**outer, "json_schema": msgspec.Raw(_encode(inner))}


def echo_text(text: TextOptions | None) -> msgspec.Raw:
    verbosity = text.verbosity if text is not None else None
    text_echo: Json = {"format": {"type": "text"}, "verbosity": verbosity or "medium"}
    if text is not None and text.format:
        text_echo["format"] = text.format
    return echo_json(text_echo, PLAIN_TEXT)

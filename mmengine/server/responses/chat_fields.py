"""Tools and forms of answers, from the shape that responses have to that of chat, and as responses repeat
them. What else is wrong with them, whoever reads chat's says."""

from collections.abc import Sequence

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath
from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.response_echo import NOTHING, PLAIN_TEXT, echo_json
from mmengine.server.http.errors import ApiError
from mmengine.server.responses.body import TextOptions

_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_encode = msgspec.json.encode


def chat_tools(tools: Sequence[Json], max_tools: int) -> list[Json]:
    """Raises ApiError."""
    if len(tools) > max_tools:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{FIELD} has {len(tools)} entries; at most {max_tools} are taken",
            FieldPath("tools"),
        )
    return [_tool(FieldPath("tools", n), each) for n, each in enumerate(tools)]


def _tool(where: FieldPath, tool: Json) -> Json:
    kind = tool.get("type")
    if kind != "function":
        return {"type": kind}
    if "function" in tool:
        text = "has its name and parameters in function, as chat has them; put them beside type"
        raise ApiError(ErrorCode.UNKNOWN_FIELD, f"{FIELD} {text}", where / "function")
    return {"type": kind, "function": {name: value for name, value in tool.items() if name != "type"}}


def echo_tools(tools: Sequence[Json]) -> msgspec.Raw:
    """With the fields that a response always has."""
    return echo_json([{"parameters": None, "strict": None, **tool} for tool in tools], NOTHING)


def chat_choice(given: str | Json | None) -> str | Json | None:
    """What names a function, with the function's name in an object."""
    if not isinstance(given, dict):
        return given
    if given.get("type") == "allowed_tools":
        allowed = {name: value for name, value in given.items() if name != "type"}
        tools = allowed.get("tools")
        if isinstance(tools, list):
            allowed["tools"] = [_chosen(each) if isinstance(each, dict) else each for each in tools]
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _chosen(given)


def _chosen(given: Json) -> Json:
    if given.get("type") != "function" or "function" in given:
        return given
    return {"type": "function", "function": {name: each for name, each in given.items() if name != "type"}}


def chat_form(text: TextOptions | None) -> dict[str, msgspec.Raw] | None:
    """`response_format`. A schema is not read here: it may be large. Raises ApiError."""
    form = text.format if text is not None else None
    if form is not None and "json_schema" in form:
        where = "text.format.json_schema"
        why = "is how chat has it; put its name and schema beside type"
        raise ApiError(ErrorCode.UNKNOWN_FIELD, f"{FIELD} {why}", where)
    if form is None or bytes(form.get("type", b"")) != b'"json_schema"':
        return form
    inner = {name: raw for name, raw in form.items() if name in _SCHEMA_FIELDS}
    outer = {name: raw for name, raw in form.items() if name not in _SCHEMA_FIELDS}
    return {**outer, "json_schema": msgspec.Raw(_encode(inner))}


def echo_text(text: TextOptions | None) -> msgspec.Raw:
    verbosity = text.verbosity if text is not None else None
    said: Json = {"format": {"type": "text"}, "verbosity": verbosity or "medium"}
    if text is not None and text.format:
        said["format"] = text.format
    return echo_json(said, PLAIN_TEXT)

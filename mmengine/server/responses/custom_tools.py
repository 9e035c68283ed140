"""Converts custom tools in the Responses API to functions, and calls to these functions to text inputs. A
custom tool takes a text instead of named arguments.

The model calls a function with a single argument, and the response contains this argument's text. Sampling
enforces the tool's regular expression or Lark grammar on this text. A grammar that cannot be enforced is
refused, or is ignored on a lenient server.
"""

from collections.abc import Sequence

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, shown
from mmengine.server.chat.parsed_request import Json
from mmengine.server.http.errors import ApiError
from mmengine.server.http.unsupported import Unsupported
from mmengine.structured_output.json_schema.normalization import SchemaRefused, normalize_schema
from mmengine.structured_output.lark.json_text import json_string_grammar
from mmengine.structured_output.lark.parser import UnsupportedLark
from mmengine.structured_output.request.tool_calls import INPUT

_decode_tools = msgspec.json.Decoder(list[dict[str, object]]).decode
_decode_arguments = msgspec.json.Decoder(dict[str, object]).decode
_FIELDS = ("type", "name", "description", "format")


def custom_tool(where: FieldPath, tool: Json, unsupported: Unsupported) -> Json:
    """Return the function that represents a custom tool in the chat body. Raises ApiError."""
    for name in tool:
        if name not in _FIELDS:
            text = f"{FIELD} is unknown; use {', '.join(_FIELDS)}"
            unsupported.leave_out(ApiError(ErrorCode.UNKNOWN_FIELD, text, where / name[:64]))
    description = tool.get("description") or ""
    if not isinstance(description, str):
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be a string", where / "description")
    text_schema: Json = {"type": "string"}
    is_strict = False
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        text = f"{FIELD} must be an object of type text or grammar, not {shown(form)}"
        raise ApiError(ErrorCode.INVALID_VALUE, text, where / "format")
    if form["type"] == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("regex", "lark") or not isinstance(definition, str):
            text = f"{FIELD} requires syntax regex or lark, and a definition"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where / "format")
        trouble = _trouble_of_regex(definition) if syntax == "regex" else _trouble_of(definition)
        if trouble:
            kind = "regular expression" if syntax == "regex" else "Lark grammar"
            text = f"{FIELD}: the {kind} cannot be enforced: {trouble}"
            refused = ApiError(ErrorCode.INVALID_GRAMMAR, text, where / "format" / "definition")
            unsupported.leave_out(refused, f"{syntax}, not enforced")
        elif syntax == "regex":
            is_strict = True
            text_schema["pattern"] = f"^(?:{definition})$"
        if syntax == "lark":
            description = f"{description}\nThe input follows this Lark grammar:\n{definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: text_schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": tool.get("name"), "parameters": parameters, "strict": is_strict}
    return {"type": "function", "function": function | ({"description": description} if description else {})}


def _trouble_of_regex(regex: str) -> str:
    """Return the reason why a regular expression cannot be enforced, or "" if it can be enforced."""
    try:
        normalize_schema({"type": "string", "pattern": regex})
    except SchemaRefused as error:
        return error.why
    return ""


def _trouble_of(lark: str) -> str:
    """Return the reason why a Lark grammar cannot be enforced, or "" if the grammar can be enforced."""
    try:
        json_string_grammar(lark)
    except UnsupportedLark as error:
        return str(error)
    return ""


def enforced_larks(tools: Sequence[Json]) -> dict[str, str]:
    """Return the Lark grammars that can be enforced, keyed by custom tool name."""
    found: dict[str, str] = {}
    for tool in tools:
        form = tool.get("format")
        if tool.get("type") != "custom" or not isinstance(form, dict) or form.get("syntax") != "lark":
            continue
        name, definition = tool.get("name"), form.get("definition")
        if isinstance(name, str) and isinstance(definition, str) and not _trouble_of(definition):
            found[name] = definition
    return found


def custom_names(tools: msgspec.Raw) -> frozenset[str]:
    """Return the custom tools' names. `tools`: the tools in the response object, as JSON."""
    if b'"custom"' not in bytes(tools):
        return frozenset()
    return frozenset(str(tool["name"]) for tool in _decode_tools(tools) if tool.get("type") == "custom")


def call_input(arguments: str) -> str:
    """Return the input text in a tool call's arguments. Incomplete arguments are returned unchanged."""
    try:
        given = _decode_arguments(arguments).get(INPUT)
    except (msgspec.MsgspecError, RecursionError):
        given = None
    return given if isinstance(given, str) else arguments

"""Parses tools in OpenAI's format, and builds the grammar for answers with tool calls."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.request import CallFormat, GrammarRequest
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.request.fields import (
    Truncation,
    check_flag,
    check_mapping,
    refuse_unknown_fields,
)
from mmengine.structured_output.request.tool_calls import (
    NONE,
    Choice,
    RequestedTool,
    ToolCalls,
    calls_of,
    tool_calls,
)

MAX_TOOLS = 128  # maximum number of tools in a request
MAX_TOOL_BYTES = 256 * 2**10  # maximum size of a request's tools as JSON, in bytes
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")  # the rule in OpenAI's Responses API and in Anthropic's API
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
NO_TEMPLATE = (
    "tools need a chat template that describes the tools and the calls, and this model's template does not; "
    "give another template (mmengine serve --chat-template, or chat_template in template_options)"
)

Json = Mapping[str, object]
NO_LARKS: Mapping[str, str] = MappingProxyType({})


class ToolLimits(NamedTuple):
    """Limits on a request's tools. With `is_strict`, every tool's schema must be enforceable."""

    max_tools: int = MAX_TOOLS
    max_bytes: int = MAX_TOOL_BYTES
    is_strict: bool = False


class ToolSelection(msgspec.Struct, frozen=True):
    """A request's tools. The chat template gets all tools in `shown`. The model may call only the tools in
    `tools`.
    """

    shown: tuple[dict[str, object], ...]
    tools: tuple[RequestedTool, ...]
    choice: Choice
    parallel: bool = True


class ToolCallSpec(msgspec.Struct, frozen=True):
    """The tools that an answer may call, and the calls' text format.

    `reasoning`: the strings that begin and end the model's reasoning; None for a model without reasoning.
    """

    selection: ToolSelection
    format: CallFormat
    reasoning: tuple[str, str] | None = None


def parse_tools(
    tools: object,
    tool_choice: object = None,
    parallel_tool_calls: object = None,
    limits: ToolLimits = ToolLimits(),  # noqa: B008 (it is frozen)
    larks: Mapping[str, str] = NO_LARKS,
) -> ToolSelection | None:
    """Parse a request's tools. Returns None without tools, or if `tool_choice` is "none".

    `larks`: custom tool's name -> Lark grammar for the tool's input. Raises InvalidRequest with the invalid
    field's path.
    """
    parallel = parallel_tool_calls is None or check_flag(
        FieldPath("parallel_tool_calls"), parallel_tool_calls
    )
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise InvalidRequest(f"{FIELD} must be a list, not {shown(tools)}", path=FieldPath("tools"))
    if not tools:
        if tool_choice not in (None, "auto", "none"):
            raise InvalidRequest(
                f"{FIELD} asks for a call, but there are no tools to call", path=FieldPath("tool_choice")
            )
        return None
    given = [_without_nulls(FieldPath("tools", n), each) for n, each in enumerate(_bounded(tools, limits))]
    found = [_tool(FieldPath("tools", n, "function"), each, limits) for n, each in enumerate(given)]
    found = [tool._replace(lark=larks.get(tool.name, "")) for tool in found]
    names = [tool.name for tool in found]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise InvalidRequest(
                f"{FIELD}, {shown(name)}, is also the name of another tool; names must differ",
                path=FieldPath("tools", n, "function", "name"),
            )
    if tool_choice == "none":
        return None
    choice, chosen = _choice(tool_choice, names)
    return ToolSelection(tuple(given), tuple(tool for tool in found if tool.name in chosen), choice, parallel)


def _bounded(tools: Sequence[object], limits: ToolLimits) -> Sequence[object]:
    if len(tools) > limits.max_tools:
        raise InvalidRequest(
            f"{FIELD} has {len(tools)} entries; the limit is {limits.max_tools} (max_tools)",
            path=FieldPath("tools"),
        )
    try:
        size = len(msgspec.json.encode(tools))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(f"{FIELD} must be JSON data", path=FieldPath("tools")) from None
    if size > limits.max_bytes:
        raise InvalidRequest(
            f"{FIELD} has {size:,} bytes as JSON; the limit is {limits.max_bytes:,} (max_tool_bytes)",
            path=FieldPath("tools"),
        )
    return tools


def _without_nulls(where: FieldPath, given: object) -> dict[str, object]:
    """Return a tool without its null fields, for the chat template.

    Raises InvalidRequest if the tool's type is not function.
    """
    tool = {name: each for name, each in check_mapping(where, given).items() if each is not None}
    kind = tool.get("type")
    if kind != "function":
        raise InvalidRequest(f"{FIELD} must be function, not {shown(kind)}", path=where / "type")
    refuse_unknown_fields(where, tool, ("type", "function"))
    function = check_mapping(where / "function", tool.get("function"))
    return {**tool, "function": {name: each for name, each in function.items() if each is not None}}


def _tool(where: FieldPath, tool: Json, limits: ToolLimits) -> RequestedTool:
    function = check_mapping(where, tool["function"])
    refuse_unknown_fields(where, function, _FUNCTION_FIELDS)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{FIELD} must have 1 to 128 letters, digits, underscores and dashes, not {shown(name)}",
            path=where / "name",
        )
    if not isinstance(function.get("description", ""), str):
        raise InvalidRequest(f"{FIELD} must be a string", path=where / "description")
    place = where / "parameters"
    parameters = check_mapping(place, function.get("parameters", _EMPTY))
    is_strict = check_flag(where / "strict", function.get("strict")) or limits.is_strict
    return RequestedTool(name, msgspec.json.encode(parameters), place, is_strict)


def _choice(given: object, names: Sequence[str]) -> tuple[Choice, Sequence[str]]:
    """Return the choice (auto, required or named) and the callable tools' names."""
    if given is None or given == "auto":
        return "auto", names
    if given == "required":
        return "required", names
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"{FIELD} must be none, auto, required or an object that names a function, not {shown(given)}",
            path=FieldPath("tool_choice"),
        )
    if given.get("type") == "allowed_tools":
        return _allowed(FieldPath("tool_choice", "allowed_tools"), given.get("allowed_tools"), names)
    refuse_unknown_fields(FieldPath("tool_choice"), given, ("type", "function"))
    return "named", [_named(FieldPath("tool_choice"), given, names)]


def _allowed(where: FieldPath, given: object, names: Sequence[str]) -> tuple[Choice, Sequence[str]]:
    allowed = check_mapping(where, given)
    refuse_unknown_fields(where, allowed, ("mode", "tools"))
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode != "auto" and mode != "required":
        raise InvalidRequest(f"{FIELD} must be auto or required, not {shown(mode)}", path=where / "mode")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{FIELD} must be a list of at least one tool", path=where / "tools")
    return mode, [_named(where / "tools" / n, each, names) for n, each in enumerate(tools)]


def _named(where: FieldPath, given: object, names: Sequence[str]) -> str:
    tool = check_mapping(where, given)
    if tool.get("type") != "function":
        raise InvalidRequest(f"{FIELD} must be function, not {shown(tool.get('type'))}", path=where / "type")
    name = check_mapping(where / "function", tool.get("function")).get("name")
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest(
            f"{FIELD}, {shown(name)}, is not among the tools: {_list(names)}",
            path=where / "function" / "name",
        )
    return name


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def call_grammar(
    calls: ToolCallSpec, answer: GrammarRequest | None, on_truncation: Truncation
) -> GrammarRequest:
    """Return the grammar for an answer that may call tools.

    `answer` is the grammar for an answer without calls, if any. Raises InvalidRequest.
    """
    if answer is not None and answer.kind != "json_schema":
        raise InvalidRequest(
            f"{FIELD} beside tools must be json_schema or json_object, or structured_outputs.json; "
            "leave out the tools, or give another format",
            path=FieldPath("response_format"),
        )
    selection = calls.selection
    text = answer.source if answer is not None and selection.choice == "auto" else "null"
    made = _made(
        selection.tools,
        selection.choice,
        selection.parallel,
        calls.format,
        calls.reasoning,
        text,
        on_truncation,
    )
    return made if answer is None else msgspec.structs.replace(made, max_digits=answer.max_digits)


@lru_cache(maxsize=64)
def _made(
    tools: tuple[RequestedTool, ...],
    choice: Choice,
    parallel: bool,
    form: CallFormat,
    reasoning: tuple[str, str] | None,
    answer: str,
    on_truncation: Truncation,
) -> GrammarRequest:
    """Return the grammar for `call_grammar`. `answer`: the schema for an answer without calls, or "null". The
    results are cached.
    """
    raw = msgspec.Raw(answer.encode()) if answer != "null" else NONE
    calls = ToolCalls(form, (), choice, parallel, raw, reasoning if choice == "auto" else None)
    return tool_calls(tools, calls, on_truncation)


def notes_on(grammar: GrammarRequest) -> tuple[Note, ...]:
    """Return a note for each tool whose schema the grammar does not enforce."""
    text = "its schema cannot be enforced: calls must be objects, and are checked when they are complete"
    calls = calls_of(grammar)
    names = () if calls is None else calls.unenforced
    return tuple(Note("tools", f"#/{name}", text, warning=True) for name in names)

r"""Converts tools to a GrammarRequest for answers with tool calls, and reads tools from a GrammarRequest.
Also examines the tools' schemas. Chat templates use two syntaxes for calls:

    json   <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>
    xml    <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>

Calls are separated by a line break, and no text follows the last call. In the xml syntax, a parameter that
can only be a string is written without quotation marks and escapes. Every other parameter is JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.request import CallFormat, GrammarRequest
from mmengine.structured_output.json_schema.normalization import MAX_OUTPUT, Bounds
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse
from mmengine.structured_output.lark.json_text import json_string_grammar
from mmengine.structured_output.lark.parser import UnsupportedLark
from mmengine.structured_output.request.fields import Truncation, normalize_cached

OPEN, CLOSE = "<tool_call>", "</tool_call>"
VALUE_END = "\n</parameter>"
Choice = Literal["auto", "required", "named"]
NONE = msgspec.Raw(b"null")
_ANY_KEY = "^(?:(?s:.)*)$"  # The pattern that normalization writes for objects with any keys.
_WRITABLE = re.compile(r"[^<>\n\r]{1,256}")
_ONE_BY_ONE = (
    "parameters are written one after the other in this model's calls, so a parameter's schema cannot depend "
    "on other parameters or on its name"
)
# Maximum number of consecutive white-space characters in arguments. Templates write a single space.
MAX_SPACES = 2
MAX_REFERENCES = 32  # Maximum length of a chain of references.

INPUT = "input"  # Name of a custom tool's only argument, which is a string.

Json = dict[str, Any]
# The arguments' schema for a custom tool with a Lark grammar. Because INPUT may have any value here, the xml
# syntax writes the input as JSON. In plain text, a parameter's end tag inside the input would be ambiguous.
_ANY_INPUT: Json = {
    "type": "object",
    "properties": {INPUT: {}},
    "required": [INPUT],
    "additionalProperties": False,
}


class CallableTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool that the model may call.

    `schema` is the normalized schema for the arguments. `given` is the requested schema if `schema` is more
    permissive, otherwise null. `lark` is a Lark grammar for the JSON string in the argument INPUT, or "" for
    a tool without a grammar.
    """

    name: str
    schema: msgspec.Raw
    given: msgspec.Raw = NONE
    lark: str = ""

    @property
    def is_enforced(self) -> bool:
        return bytes(self.given) == b"null"


class ToolCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The tool calls that an answer may or must contain.

    With `choice` "auto", the answer is text with or without calls. `answer` is the normalized schema for an
    answer without calls; null means free text. `reasoning` has the strings that begin and end reasoning, if
    reasoning may precede the answer.
    """

    format: CallFormat
    tools: tuple[CallableTool, ...]
    choice: Choice = "auto"
    parallel: bool = True
    answer: msgspec.Raw = NONE
    reasoning: tuple[str, str] | None = None

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Names of tools whose requested schema is enforced only partly."""
        return tuple(tool.name for tool in self.tools if not tool.is_enforced)

    @property
    def has_form(self) -> bool:
        """Whether an answer without calls must match a schema."""
        return bytes(self.answer) != b"null"


def head_of(name: str, form: CallFormat) -> str:
    """Return the text between OPEN and the arguments in a call to this tool."""
    return f'\n{{"name": {json.dumps(name)}, "arguments": ' if form == "json" else f"\n<function={name}>\n"


class RequestedTool(NamedTuple):
    """A tool in a request.

    `parameters` is a JSON schema as text. `place` is the schema's field in the request, for errors. If
    `is_strict`, a schema that cannot be enforced is refused; otherwise the schema is relaxed.
    """

    name: str
    parameters: bytes
    place: tuple[str | int, ...]
    is_strict: bool
    lark: str = ""  # The Lark grammar for a custom tool's argument INPUT.


def tool_calls(
    tools: Sequence[RequestedTool], form: ToolCalls, on_truncation: Truncation = "length"
) -> GrammarRequest:
    """Return the GrammarRequest for calls to these tools.

    `form`: the values for all fields of ToolCalls except `tools`. Raises an InvalidRequest that names the
    tool's field and, for a schema, the keyword and its JSON pointer.
    """
    made = msgspec.structs.replace(form, tools=tuple(_tool(tool, form.format) for tool in tools))
    source = msgspec.json.encode(made).decode()
    if len(source) > MAX_OUTPUT:
        raise InvalidRequest(
            f"{FIELD}: the normalized schemas have more than {MAX_OUTPUT:,} bytes", path=FieldPath("tools")
        )
    return GrammarRequest("tool_calls", source, on_truncation=on_truncation)


def _tool(tool: RequestedTool, form: CallFormat) -> CallableTool:
    schema = msgspec.json.decode(tool.parameters, type=dict)
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequest(
            f"{FIELD} must be object, not {shown(schema['type'])}, because arguments have names",
            path=(*tool.place, "type"),
        )
    if tool.lark:
        return CallableTool(
            tool.name, _normalize(_ANY_INPUT, form), lark=_input_grammar(tool.lark, tool.place)
        )
    try:
        return CallableTool(tool.name, _normalize(schema, form))
    except SchemaRefused as error:
        if tool.is_strict:
            raise InvalidRequest(f"{FIELD}: {error}", path=tool.place) from None
    try:
        held = _normalize(_relaxed_schema(schema, form), form)
    except SchemaRefused as error:
        raise InvalidRequest(f"{FIELD}: {error}", path=tool.place) from None
    return CallableTool(tool.name, held, msgspec.Raw(tool.parameters))


def _input_grammar(lark: str, place: tuple[str | int, ...]) -> str:
    try:
        return json_string_grammar(lark)
    except UnsupportedLark as error:
        text = f"{FIELD}: the Lark grammar cannot be enforced: {error}"
        raise InvalidRequest(text, path=place, code=ErrorCode.INVALID_GRAMMAR) from None


def _normalize(schema: Json, form: CallFormat) -> msgspec.Raw:
    text = normalize_cached(schema, Bounds(whitespace=MAX_SPACES)).text
    if form == "xml":
        parameters_of(text)
    return msgspec.Raw(text.encode())


def _relaxed_schema(schema: Json, form: CallFormat) -> Json:
    """Return a more permissive schema that can be enforced.

    In the json syntax, the result allows any object. In the xml syntax, the result allows objects with the
    named properties; string properties stay strings.
    """
    properties = schema.get("properties")
    if form == "json" or not isinstance(properties, Mapping):
        return {"type": "object"}
    kept = {
        name: {"type": "string"} if isinstance(each, Mapping) and each.get("type") == "string" else {}
        for name, each in properties.items()
        if _WRITABLE.fullmatch(name)
    }
    return {"type": "object", "properties": kept, "additionalProperties": False}


class Parameters(NamedTuple):
    """A tool's parameters, for calls in the xml syntax.

    `schemas` maps each name to its normalized schema. `required` names the parameters that must be present.
    `raw` names the parameters that are written as plain text, not as JSON. `others` is the schema for all
    other parameters (None: no others).
    """

    schemas: Json
    required: frozenset[str]
    raw: frozenset[str]
    others: object
    others_are_raw: bool
    options: object  # Options for the grammar engine.
    definitions: Json


@lru_cache(maxsize=256)
def parameters_of(schema: str) -> Parameters:
    """Return the parameters in a normalized schema.

    Raises SchemaRefused if calls cannot spell a name, or if the schema restricts combinations of parameters.
    """
    found = msgspec.json.decode(schema, type=dict)
    definitions = found.get("$defs", {})
    found = _resolve(found, definitions)
    others = _others(found)
    if found.get("type") != "object" or others is False:
        refuse("", "", _ONE_BY_ONE)
    schemas: Json = found.get("properties", {})
    for name in schemas:
        if not _WRITABLE.fullmatch(name):
            refuse("properties", "/properties", f"this model's calls cannot spell the name {shown(name)}")
    if schemas:
        others = None
    raw = frozenset(name for name, each in schemas.items() if allows_only_strings(each, definitions))
    return Parameters(
        schemas,
        frozenset(found.get("required", ())),
        raw,
        others,
        others is not None and allows_only_strings(others, definitions),
        found.get("x-guidance", {}),
        definitions,
    )


def _others(schema: Json) -> object:
    """Return the schema for properties that an object's schema does not name.

    Returns None if no such properties are allowed, and False if they have several schemas.
    """
    patterns: Json = schema.get("patternProperties", {})
    if patterns and list(patterns) != [_ANY_KEY]:
        return False
    found = [patterns[_ANY_KEY]] if patterns else []
    # Normalization turns an additionalProperties that is a schema into a branch of allOf.
    for each in schema.get("allOf", ()):
        if each.get("patternProperties") or any(
            one is not True for one in each.get("properties", {}).values()
        ):
            return False
        found.append(each.get("additionalProperties", True))
    return next((each for each in found if each is not True), True) if found else None


def allows_only_strings(schema: object, definitions: Json, depth: int = 0) -> bool:
    """Return whether a normalized schema allows only strings."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return False
    schema = _resolve(schema, definitions)
    if "anyOf" in schema:
        return all(allows_only_strings(each, definitions, depth + 1) for each in schema["anyOf"])
    return schema.get("type") == "string"


def _resolve(schema: Json, definitions: Json) -> Json:
    for _ in range(MAX_REFERENCES):
        if "$ref" not in schema:
            break
        beside = {name: each for name, each in schema.items() if name != "$ref"}
        schema = {**beside, **definitions[schema["$ref"].removeprefix("#/$defs/")]}
    return schema


# Built at import: msgspec crashes if two threads are the first to use a type.
_decode_calls = msgspec.json.Decoder(ToolCalls).decode


@lru_cache(maxsize=64)
def read_tool_calls(source: str) -> ToolCalls:
    """Decode the source in a GrammarRequest that `tool_calls` returned. Raises msgspec.MsgspecError."""
    return _decode_calls(source)


def calls_of(grammar: GrammarRequest | None) -> ToolCalls | None:
    """Return a grammar's tool calls, or None for a grammar of another kind."""
    is_calls = grammar is not None and grammar.kind == "tool_calls"
    return read_tool_calls(grammar.source) if grammar is not None and is_calls else None


def json_spelling(text: str) -> str:
    """Return a text's spelling inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

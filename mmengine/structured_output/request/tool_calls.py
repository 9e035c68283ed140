"""Calls of tools as the form of an answer, in the two spellings that chat templates teach models:

    json   <tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>
    xml    <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>

Calls stand one behind the other, with a line's end between them, and nothing comes behind them. In xml a
parameter that can only be a string is written as it is, every other one as JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.request import CallFormat, GrammarRequest
from mmengine.structured_output.json_schema.normalization import MAX_OUTPUT, Bounds
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused, refuse
from mmengine.structured_output.request.fields import Truncation, normalize_cached

OPEN, CLOSE = "<tool_call>", "</tool_call>"
VALUE_END = "\n</parameter>"
Choice = Literal["auto", "required", "named"]
NONE = msgspec.Raw(b"null")
_ANY_KEY = "^(?:(?s:.)*)$"  # the gate's pattern of all keys
_WRITABLE = re.compile(r"[^<>\n\r]{1,256}")
_ONE_BY_ONE = (
    "this model's calls name one parameter after the other, so that what one may be cannot depend on "
    "another, nor on its name"
)
MAX_SPACES = 2  # characters of white space in a row in arguments: templates show models one
MAX_REFERENCES = 32  # of one property, one to another

Json = dict[str, Any]


class CallableTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`schema`: of the arguments, as the gate left it. `given`: the schema that was asked for, where calls
    are held to less than it says; null where they are held to all of it."""

    name: str
    schema: msgspec.Raw
    given: msgspec.Raw = NONE

    @property
    def is_enforced(self) -> bool:
        return bytes(self.given) == b"null"


class ToolCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`choice` auto: text, or text and calls. `answer`: the schema of an answer that makes no calls, as the
    gate left it; null: free text. `reasoning`: markers between which a model may reason first."""

    format: CallFormat
    tools: tuple[CallableTool, ...]
    choice: Choice = "auto"
    parallel: bool = True
    answer: msgspec.Raw = NONE
    reasoning: tuple[str, str] | None = None

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Names of the tools whose calls are held to less than their schemas say."""
        return tuple(tool.name for tool in self.tools if not tool.is_enforced)

    @property
    def has_form(self) -> bool:
        """Whether an answer without calls has a form too."""
        return bytes(self.answer) != b"null"


def head_of(name: str, form: CallFormat) -> str:
    """What a call of a tool says behind OPEN, before its arguments."""
    return f'\n{{"name": {json.dumps(name)}, "arguments": ' if form == "json" else f"\n<function={name}>\n"


class AskedTool(NamedTuple):
    """`parameters`: a JSON schema, as text. `place`: the field that it stands in. `is_strict`: it is refused
    rather than held to less."""

    name: str
    parameters: bytes
    place: tuple[str | int, ...]
    is_strict: bool


def tool_calls(
    tools: Sequence[AskedTool], form: ToolCalls, on_truncation: Truncation = "length"
) -> GrammarRequest:
    """The grammar of calls of these tools; `form` is what is asked for beside them. Raises InvalidRequest,
    naming the tool's field, and of its schema the keyword and its place."""
    made = msgspec.structs.replace(form, tools=tuple(_tool(tool, form.format) for tool in tools))
    source = msgspec.json.encode(made).decode()
    if len(source) > MAX_OUTPUT:
        raise InvalidRequest(
            f"{FIELD}: worked out, their schemas have more than {MAX_OUTPUT:,} bytes", path=FieldPath("tools")
        )
    return GrammarRequest("tool_calls", source, on_truncation=on_truncation)


def _tool(tool: AskedTool, form: CallFormat) -> CallableTool:
    schema = msgspec.json.decode(tool.parameters, type=dict)
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequest(
            f"{FIELD} must be object, not {shown(schema['type'])}: arguments are named",
            path=(*tool.place, "type"),
        )
    try:
        return CallableTool(tool.name, _gated(schema, form))
    except SchemaRefused as error:
        if tool.is_strict:
            raise InvalidRequest(f"{FIELD}: {error}", path=tool.place) from None
    try:
        held = _gated(_looser(schema, form), form)
    except SchemaRefused as error:
        raise InvalidRequest(f"{FIELD}: {error}", path=tool.place) from None
    return CallableTool(tool.name, held, msgspec.Raw(tool.parameters))


def _gated(schema: Json, form: CallFormat) -> msgspec.Raw:
    text = normalize_cached(schema, Bounds(whitespace=MAX_SPACES)).text
    if form == "xml":
        parameters_of(text)
    return msgspec.Raw(text.encode())


def _looser(schema: Json, form: CallFormat) -> Json:
    """An object; in xml one of the properties that are named, strings where they are said to be."""
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
    """Of a tool whose calls are written as xml: the schema of each as the gate left it, those that must come,
    those whose values are written as they are, and the schema of others (None: there are none)."""

    schemas: Json
    required: frozenset[str]
    raw: frozenset[str]
    others: object
    others_are_raw: bool
    options: object  # of the grammar engine
    definitions: Json


@lru_cache(maxsize=256)
def parameters_of(schema: str) -> Parameters:
    """`schema`: the gate's. Raises SchemaRefused where values that are written one by one cannot be held to
    it."""
    found = msgspec.json.decode(schema, type=dict)
    definitions = found.get("$defs", {})
    found = _resolved(found, definitions)
    others = _others(found)
    if found.get("type") != "object" or others is False:
        refuse("", "", _ONE_BY_ONE)
    schemas: Json = found.get("properties", {})
    for name in schemas:
        if not _WRITABLE.fullmatch(name):
            refuse("properties", "/properties", f"this model's calls cannot write the name {shown(name)}")
    if schemas:
        others = None
    raw = frozenset(name for name, each in schemas.items() if is_text(each, definitions))
    return Parameters(
        schemas,
        frozenset(found.get("required", ())),
        raw,
        others,
        others is not None and is_text(others, definitions),
        found.get("x-guidance", {}),
        definitions,
    )


def _others(schema: Json) -> object:
    """The schema of properties that have no name in one of an object; None: there are none; False: they are
    not of one schema."""
    patterns: Json = schema.get("patternProperties", {})
    if patterns and list(patterns) != [_ANY_KEY]:
        return False
    found = [patterns[_ANY_KEY]] if patterns else []
    for each in schema.get("allOf", ()):  # what the gate writes of additionalProperties that is a schema
        if each.get("patternProperties") or any(
            one is not True for one in each.get("properties", {}).values()
        ):
            return False
        found.append(each.get("additionalProperties", True))
    return next((each for each in found if each is not True), True) if found else None


def is_text(schema: object, definitions: Json, depth: int = 0) -> bool:
    """Whether only strings are of a schema that the gate wrote."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return False
    schema = _resolved(schema, definitions)
    if "anyOf" in schema:
        return all(is_text(each, definitions, depth + 1) for each in schema["anyOf"])
    return schema.get("type") == "string"


def _resolved(schema: Json, definitions: Json) -> Json:
    for _ in range(MAX_REFERENCES):
        if "$ref" not in schema:
            break
        beside = {name: each for name, each in schema.items() if name != "$ref"}
        schema = {**beside, **definitions[schema["$ref"].removeprefix("#/$defs/")]}
    return schema


# Made here: two threads that are the first to decode a type crash in msgspec, which learns it then.
_decode_calls = msgspec.json.Decoder(ToolCalls).decode


@lru_cache(maxsize=64)
def read_tool_calls(source: str) -> ToolCalls:
    """What `tool_calls` wrote. Raises msgspec.MsgspecError."""
    return _decode_calls(source)


def calls_of(grammar: GrammarRequest | None) -> ToolCalls | None:
    """None for another form than calls."""
    is_calls = grammar is not None and grammar.kind == "tool_calls"
    return read_tool_calls(grammar.source) if grammar is not None and is_calls else None


def as_json(text: str) -> str:
    """A text as JSON has it between its quotation marks: of two pieces, the two put together."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

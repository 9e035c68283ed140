"""What may be asked of an answer's form, and the text by which the engine and its log know it.

That text, `Request.grammar`, is JSON and complete in itself: another process compiles the same from it.

    {"type": "json_schema", "schema": {…}}     as the gate left it, bounds included
    {"type": "regex", "regex": "…"}
    {"type": "choice", "choices": ["…", …]}
    {"type": "lark", "lark": "start: …"}
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from mmengine.errors import InvalidRequest, shown
from mmengine.structured_output.schema import Bounds, gate

MAX_GRAMMAR_CHARS = 256 * 1024  # of a regex or a Lark grammar, and of all choices together
MAX_CHOICES = 10_000
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("schema", "strict", "name", "description")
_KINDS = ("regex", "choice", "lark")


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    schema: msgspec.Raw


class Regex(msgspec.Struct, frozen=True, tag="regex", forbid_unknown_fields=True):
    regex: str


class Choice(msgspec.Struct, frozen=True, tag="choice", forbid_unknown_fields=True):
    choices: tuple[str, ...]


class Lark(msgspec.Struct, frozen=True, tag="lark", forbid_unknown_fields=True):
    lark: str


Grammar = JsonSchema | Regex | Choice | Lark
_read = msgspec.json.Decoder(Grammar).decode


def read_grammar(text: str) -> Grammar:
    """What a grammar's text says. Raises InvalidRequest for a text that `grammar_of` did not make."""
    try:
        return _read(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"the grammar cannot be read: {error}") from None


def grammar_of(
    response_format: Mapping[str, Any] | None = None,
    grammar: Mapping[str, Any] | None = None,
) -> str | None:
    """The text of what was asked for, None for free text.

    `response_format`: {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema":
    {"schema": {…}}}, whose `strict` changes nothing: a schema is always enforced. Beside "type" it may have
    "bounds", an object of those of bounds.py, or false for none. `grammar`: {"regex": …}, {"choice": […]} or
    {"lark": …}. Raises InvalidRequest, naming what cannot be enforced and where it stands.
    """
    if response_format is not None and grammar is not None:
        raise InvalidRequest("give response_format or grammar, not both")
    if response_format is not None:
        schema, bounds = _schema_of(response_format), _bounds_of(response_format)
        return None if schema is None else _schema_text(schema, bounds)
    return None if grammar is None else _text_of(grammar)


def _schema_of(response_format: Mapping[str, Any]) -> Any:
    """The schema asked for; None for free text."""
    kind = _mapping("response_format", response_format).get("type")
    if kind not in _FORMATS:
        raise InvalidRequest(f"response_format.type must be {', '.join(_FORMATS)}, not {shown(kind)}")
    known = {"text": ("type",), "json_object": ("type", "bounds"), "json_schema": ("type", kind, "bounds")}
    _refuse_others("response_format", response_format, known[kind])
    if kind != "json_schema":
        return None if kind == "text" else {"type": "object"}
    given = _mapping("response_format.json_schema", response_format.get("json_schema"))
    _refuse_others("response_format.json_schema", given, _SCHEMA_FIELDS)
    if "schema" not in given:
        raise InvalidRequest("response_format.json_schema must hold a schema")
    if given.get("strict") not in (None, True, False):
        raise InvalidRequest("response_format.json_schema.strict must be true or false")
    return given["schema"]


def _bounds_of(response_format: Mapping[str, Any]) -> Bounds:
    given = response_format.get("bounds")
    if given is False:
        return Bounds.off()
    try:
        return Bounds() if given is None else msgspec.convert(given, Bounds)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"response_format.bounds cannot be used: {error}") from None


def _schema_text(schema: Any, bounds: Bounds) -> str:
    """Lines of a batch mostly ask for the same: it is worked out once, and is one object for all of them."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):  # the gate says what it is that is no JSON
        return _gated(schema, bounds)
    return _gated_before(text, bounds)


@lru_cache(maxsize=64)
def _gated_before(text: bytes, bounds: Bounds) -> str:
    return _gated(text, bounds)


def _gated(schema: Any, bounds: Bounds) -> str:
    return f'{{"type":"json_schema","schema":{gate(schema, bounds)}}}'


def _text_of(grammar: Mapping[str, Any]) -> str:
    _refuse_others("grammar", _mapping("grammar", grammar), _KINDS)
    if len(grammar) != 1:
        raise InvalidRequest(f"grammar holds one of {', '.join(_KINDS)}")
    kind, value = next(iter(grammar.items()))
    if kind == "choice":
        return msgspec.json.encode(Choice(_choices(value))).decode()
    made = {"regex": Regex, "lark": Lark}[kind](_checked(f"grammar.{kind}", value))
    return msgspec.json.encode(made).decode()


def _choices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"grammar.choice must be a list of 1 to {MAX_CHOICES} strings")
    choices = tuple(dict.fromkeys(_checked(f"grammar.choice[{n}]", each) for n, each in enumerate(value)))
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"grammar.choice holds more than {MAX_GRAMMAR_CHARS} characters")
    return choices


def _checked(where: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{where} must be a string of at most {MAX_GRAMMAR_CHARS} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{where} holds an unpaired surrogate at character {error.start}") from None
    return value


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object, not {shown(value)}")
    return value


def _refuse_others(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{where} has the unknown field {shown(name)}; known are {', '.join(known)}")

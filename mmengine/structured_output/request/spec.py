"""Reads `response_format` and `grammar` into a GrammarRequest (request.py), which the log stores.

Each kind of GrammarRequest has this source:

    json_schema      the normalized schema, bounds included, as JSON
    regex            the regular expression
    choice           a JSON list of texts
    lark             the grammar
    structural_tag   a JSON object of structures, triggers, … (structural_tags.py)
    tool_calls       a JSON object of tools, their format, … (tool_calls.py)
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from sys import intern
from typing import Any

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.request import GrammarRequest
from mmengine.structured_output.gbnf.convert import convert
from mmengine.structured_output.json_schema.reading.loading import parse_schema
from mmengine.structured_output.json_schema.vocabulary.notes import NormalizedSchema, Note
from mmengine.structured_output.request.fields import (
    bounds_of,
    check_flag,
    check_mapping,
    check_string,
    documents_of,
    normalize_cached,
    refuse_unknown_fields,
    truncation_of,
)
from mmengine.structured_output.request.strict_mode import strict_notes
from mmengine.structured_output.request.structural_tags import StructuralTag, structural_tag
from mmengine.structured_output.request.tool_calls import ToolCalls, read_tool_calls

# Maximum number of characters in a regex, in a Lark grammar, or in all choices together.
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 10_000
# Maximum number of rules in a Lark grammar. All rules may be nested in each other, which takes stack space.
MAX_RULES = 2_000
# Maximum number of `&` in a Lark grammar. Each `&` may double the number of states.
MAX_INTERSECTIONS = 16
# A comment, a string or a regular expression in a Lark grammar.
LARK_LITERAL = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_NESTED_SCHEMA = re.compile(r"%json\s*")
_JSON = json.JSONDecoder()
_RULE = re.compile(r"[\w\])}-]\s*:")  # The end of a rule's head, after its name, options or parameters.
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_FIELDS = ("schema", "strict", "name", "description")
HAS_JSON = ("json_schema", "structural_tag", "tool_calls")  # Kinds of GrammarRequest with schemas.
_KINDS = ("regex", "choice", "lark", "gbnf", "ebnf", "structural_tag")


class JsonSchema(msgspec.Struct, frozen=True):
    schema: msgspec.Raw


class Regex(msgspec.Struct, frozen=True):
    regex: str


class Choice(msgspec.Struct, frozen=True):
    choices: tuple[str, ...]


class Lark(msgspec.Struct, frozen=True):
    lark: str


Grammar = JsonSchema | Regex | Choice | Lark | StructuralTag | ToolCalls

# JSON separators (after an item, after a key): without spaces, and the defaults in Python's json.
_SPACINGS = ((",", ":"), (", ", ": "))


@lru_cache(maxsize=64)
def draft_grammars_of(grammar: GrammarRequest) -> tuple[GrammarRequest, ...]:
    """Return draft grammars, which allow fewer texts than `grammar`. Tokens that a draft grammar forces
    become drafts.

    Only a JSON Schema has draft grammars. Their white space is fixed.
    """
    found = read_grammar(grammar)
    if not isinstance(found, JsonSchema):
        return ()
    schema = msgspec.json.decode(found.schema, type=dict[str, msgspec.Raw])
    options = msgspec.json.decode(schema.pop("x-guidance", msgspec.Raw(b"{}")), type=dict)
    options.pop("whitespace_pattern", None)
    made = []
    for item, key in _SPACINGS:
        spacing = {"item_separator": item, "key_separator": key, "whitespace_flexible": False}
        body = {"x-guidance": msgspec.Raw(msgspec.json.encode({**options, **spacing})), **schema}
        source = msgspec.json.encode(body).decode()
        made.append(GrammarRequest("json_schema", source, max_digits=grammar.max_digits))
    return tuple(made)


# Built at import: msgspec crashes if two threads are the first to use a type.
_decode_tag = msgspec.json.Decoder(StructuralTag).decode


def read_grammar(grammar: GrammarRequest) -> Grammar:
    """Return a request's grammar as an instance of the class for its kind.

    Raises InvalidRequest for an invalid source.
    """
    source = grammar.source
    try:
        match grammar.kind:
            case "json_schema":
                return JsonSchema(msgspec.json.decode(source, type=msgspec.Raw))
            case "regex":
                return Regex(source)
            case "choice":
                return Choice(msgspec.json.decode(source, type=tuple[str, ...]))
            case "lark":
                return Lark(source)
            case "structural_tag":
                return _decode_tag(source)
            case "tool_calls":
                return read_tool_calls(source)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"the grammar cannot be read: {error}", code=ErrorCode.INVALID_GRAMMAR) from None
    raise InvalidRequest(
        f"the grammar cannot be read: its kind {shown(grammar.kind)} is unknown",
        code=ErrorCode.INVALID_GRAMMAR,
    )


def grammar_of(
    response_format: Mapping[str, Any] | None = None,
    grammar: Mapping[str, Any] | None = None,
) -> GrammarRequest | None:
    """Return the requested grammar, or None for free text.

    Equal sources share a string object. This saves memory, because most lines in a batch have the same
    grammar.

    `response_format` is {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema":
    {"schema": {…}}} or {"type": "structural_tag", …} with the fields from structural_tags.py. A schema is
    always enforced; `strict` only adds notes. All types except text may have further fields:

    * "bounds": an object with fields from bounds.py, or false for no bounds.
    * "on_truncation": "close" or "length" (the default).
    * "field_confidence": only for json_object and json_schema.
    * "schemas": only for json_schema; a mapping from URIs to referenced documents.
    * "strict_keywords": only for json_schema; true refuses unknown keywords.

    `grammar` is {"regex": …}, {"choice": […]}, {"lark": …}, {"gbnf": …} ("ebnf" is the same) or
    {"structural_tag": {…}}. Each may have "on_truncation". `reasoning_of` reads the field "reasoning". Raises
    InvalidRequest with the JSON pointer of the part that cannot be enforced.
    """
    if response_format is not None and grammar is not None:
        raise InvalidRequest("give response_format or grammar, not both")
    if response_format is not None:
        asked, truncation = truncation_of(FieldPath("response_format"), response_format)
        scored = _scored(asked)
        found = _format_of(asked)
        if found is None and truncation == "close":
            raise InvalidRequest(
                f"{FIELD}: text has no format that could be completed",
                path=FieldPath("response_format", "on_truncation"),
            )
    elif grammar is not None:
        asked, truncation = truncation_of(FieldPath("grammar"), grammar)
        found, scored = _grammar_of(asked), False
    else:
        return None
    if found is None:
        return None
    max_digits = _max_digits(asked.get("structural_tag", asked) if response_format is None else asked)
    return GrammarRequest(
        found[0],
        intern(found[1]),
        on_truncation=truncation,
        max_digits=max_digits,
        field_confidence=scored,
    )


def _scored(response_format: Mapping[str, object]) -> bool:
    """Return whether the fields' confidences are requested."""
    where = FieldPath("response_format", "field_confidence")
    scored = check_flag(where, response_format.get("field_confidence"))
    kind = response_format.get("type")
    if scored and kind in ("text", "structural_tag"):
        raise InvalidRequest(
            f"{FIELD} needs an answer that is one JSON value: use the type json_schema or json_object, "
            f"not {kind}",
            path=where,
        )
    return scored


def reasoning_of(
    response_format: Mapping[str, Any] | None = None, grammar: Mapping[str, Any] | None = None
) -> bool | None:
    """Return whether the grammar begins after the model's reasoning, or None if the prompt decides.

    Takes the arguments of `grammar_of`. Raises InvalidRequest.
    """
    where, given = FieldPath("grammar"), grammar
    if response_format is not None:
        where, given = FieldPath("response_format"), response_format
    value = None if given is None else check_mapping(where, given).get("reasoning")
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{FIELD} must be true or false, not {shown(value)}", path=where / "reasoning")
    return value


def _max_digits(given: object) -> int | None:
    """Return the bound max_digits in a response_format or structural tag, or None if it is not set."""
    bounds = given.get("bounds") if isinstance(given, Mapping) else None
    return bounds_of(FieldPath("bounds"), bounds).max_digits


def _format_of(response_format: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (kind, source) of a response_format, or None for free text."""
    kind = check_mapping(FieldPath("response_format"), response_format).get("type")
    if kind not in _FORMATS:
        raise InvalidRequest(
            f"{FIELD} must be {', '.join(_FORMATS)}, not {shown(kind)}",
            path=FieldPath("response_format", "type"),
        )
    if kind == "structural_tag":
        given = {name: value for name, value in response_format.items() if name != "field_confidence"}
        return kind, structural_tag(FieldPath("response_format"), _without_reasoning(given))
    made = _normalize(kind, response_format)
    return None if made is None else ("json_schema", made.text)


def _normalize(kind: str, response_format: Mapping[str, object]) -> NormalizedSchema | None:
    """Return the requested schema after normalization, or None for free text."""
    schema = _schema_of(kind, response_format)
    if schema is None:
        return None
    bounds = bounds_of(FieldPath("response_format", "bounds"), response_format.get("bounds"))
    schemas = documents_of(FieldPath("response_format", "schemas"), response_format.get("schemas"))
    strict = check_flag(
        FieldPath("response_format", "strict_keywords"), response_format.get("strict_keywords")
    )
    return normalize_cached(schema, bounds, schemas, strict)


def notes_of(response_format: Mapping[str, Any] | None) -> tuple[Note, ...]:
    """Return notes for the client on a response_format that `grammar_of` accepted.

    The notes list keywords without effect, and schema parts for which the grammar excludes some valid values.
    With `strict`, the notes also list constructs that OpenAI would refuse. Raises InvalidRequest.
    """
    if response_format is None:
        return ()
    asked, _ = truncation_of(FieldPath("response_format"), response_format)
    kind = asked.get("type")
    made = _normalize(kind, asked) if kind in ("json_object", "json_schema") else None
    if made is None:
        return ()
    given = asked[kind] if kind == "json_schema" else {}
    notes = made.notes + made.narrow
    return notes + (strict_notes(parse_schema(given["schema"])) if given.get("strict") else ())


def _schema_of(kind: str, response_format: Mapping[str, object]) -> Any:
    """Return the requested schema, or None for free text."""
    common = ("bounds", "reasoning", "field_confidence")
    known = {"text": (), "json_object": common, "json_schema": (kind, *common, "schemas", "strict_keywords")}
    refuse_unknown_fields(FieldPath("response_format"), response_format, ("type", *known[kind]))
    if kind != "json_schema":
        return None if kind == "text" else {"type": "object"}
    given = check_mapping(FieldPath("response_format", "json_schema"), response_format.get("json_schema"))
    refuse_unknown_fields(FieldPath("response_format", "json_schema"), given, _SCHEMA_FIELDS)
    if "schema" not in given:
        raise InvalidRequest(
            f"{FIELD} must contain a schema", path=FieldPath("response_format", "json_schema")
        )
    if given.get("strict") not in (None, True, False):
        raise InvalidRequest(
            f"{FIELD} must be true or false", path=FieldPath("response_format", "json_schema", "strict")
        )
    return given["schema"]


def _grammar_of(grammar: Mapping[str, Any]) -> tuple[str, str]:
    """Return (kind, source) of a grammar."""
    refuse_unknown_fields(
        FieldPath("grammar"), check_mapping(FieldPath("grammar"), grammar), (*_KINDS, "reasoning")
    )
    kinds = _without_reasoning(grammar)
    if len(kinds) != 1:
        raise InvalidRequest(
            f"{FIELD} must contain exactly one of {', '.join(_KINDS)}", path=FieldPath("grammar")
        )
    kind, value = next(iter(kinds.items()))
    if kind == "structural_tag":
        return kind, structural_tag(FieldPath("grammar", "structural_tag"), value)
    if kind == "choice":
        return kind, msgspec.json.encode(_choices(value)).decode()
    value = check_string(FieldPath("grammar", kind), value, MAX_GRAMMAR_CHARS)
    if kind != "regex":
        value = value.removeprefix("\ufeff")  # An editor's byte order mark is no part of a grammar.
    if kind == "lark":
        _check_intersections(value)
    if kind in ("gbnf", "ebnf"):
        kind, value = convert(value)
    if kind == "lark" and len(_RULE.findall(value)) > MAX_RULES:
        raise InvalidRequest(f"{FIELD} has more than {MAX_RULES:,} rules", path=FieldPath("grammar", "lark"))
    return kind, value


def _check_intersections(lark: str) -> None:
    """Raise InvalidRequest if a Lark grammar, or a schema in it, has too many intersections of texts."""
    where = FieldPath("grammar", "lark")
    if LARK_LITERAL.sub("", lark).count("&") > MAX_INTERSECTIONS:
        raise InvalidRequest(f"{FIELD} has more than {MAX_INTERSECTIONS} intersections (&)", path=where)
    for found in _NESTED_SCHEMA.finditer(lark):
        try:
            waiting: list[object] = [_JSON.raw_decode(lark, found.end())[0]]
        except (ValueError, RecursionError):
            continue  # The grammar engine reports the error.
        num_patterns, has_all_of = 0, False
        while waiting:
            each = waiting.pop()
            if isinstance(each, dict):
                num_patterns += "pattern" in each
                has_all_of |= "allOf" in each or "$ref" in each
                waiting.extend(each.values())
            elif isinstance(each, list):
                waiting.extend(each)
        if has_all_of and num_patterns > MAX_INTERSECTIONS:
            text = f"{FIELD} has a schema with allOf or $ref and more than {MAX_INTERSECTIONS} patterns"
            raise InvalidRequest(f"{text}; use response_format for the schema", path=where)


def _without_reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "reasoning"}


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(
            f"{FIELD} must be a list of 1 to {MAX_CHOICES} strings", path=FieldPath("grammar", "choice")
        )
    checked = (
        check_string(FieldPath("grammar", "choice", n), each, MAX_GRAMMAR_CHARS)
        for n, each in enumerate(value)
    )
    choices = tuple(dict.fromkeys(checked))
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{FIELD} has more than {MAX_GRAMMAR_CHARS} characters", path=FieldPath("grammar", "choice")
        )
    return choices

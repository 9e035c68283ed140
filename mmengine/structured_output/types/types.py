"""Converts Python types to JSON Schemas, and decodes answers to these types.

A caller may pass a schema (dict, true or false), or any type that msgspec supports (a Struct, a dataclass, a
TypedDict, list[int], …) or pydantic supports (a model, list[Model], a TypeAdapter, Annotated with a Field). A
class with the methods model_json_schema and model_validate_json is also accepted. pydantic is imported only
for types that need it.
"""

import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.structured_output.json_schema.normalization import normalize_schema
from mmengine.structured_output.json_schema.vocabulary.keywords import (
    SUBSCHEMA,
    SUBSCHEMA_LIST,
    SUBSCHEMA_MAP,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused
from mmengine.structured_output.partial_json import parse_json
from mmengine.structured_output.types import msgspec_schema
from mmengine.structured_output.types.type_patterns import (
    ASCII_IN_BASE64,
    FORMAT_PATTERNS,
    UNCHECKABLE,
    Schema,
)

MAX_TYPES = 10_000  # Maximum number of nested types that are searched for pydantic's types.
_OTHERS = ("pydantic", "annotated_types")


class _Reader(NamedTuple):
    """Two functions for a type: one writes the type's schema, and one decodes answers to the type."""

    schema: Callable[[], object]
    decode: Callable[[str], object]


def schema_of(what: object) -> dict | bool:
    """Return the JSON Schema for a type.

    `decode` accepts every answer that satisfies the schema, unless the type's own code (a validator) rejects
    the answer. Raises InvalidRequest with the reason if no schema can be written.
    """
    if isinstance(what, dict | bool):
        return what
    schema = _reader(what).schema()
    try:
        narrowed = _close_schema(schema)
        return _drop_idle_unique(narrowed, narrowed) if isinstance(narrowed, dict) else bool(narrowed)
    except RecursionError:
        raise InvalidRequest(f"{_name(what)} has no JSON Schema: nested too deeply") from None


def decode(text: str, what: object) -> object:
    """Decode an answer. Returns an instance if `what` is a type, and the JSON value if `what` is a schema.

    Raises RequestFailed for a text that cannot be decoded. Such a text was cut (finish_reason "length"), or
    violates a rule that a schema cannot express.
    """
    try:
        return parse_json(text) if isinstance(what, dict | bool) else _reader(what).decode(text)
    except RecursionError:
        raise RequestFailed(f"the answer is not a valid {_name(what)}: nested too deeply") from None
    except ValueError as error:  # The errors of all libraries are ValueErrors.
        why = " ".join(str(error).split())
        raise RequestFailed(f"the answer is not a valid {_name(what)}: {why:.500}") from None


def _name(what: object) -> str:
    if isinstance(what, dict | bool):
        return "JSON"
    if isinstance(what, type) and not typing.get_args(what):
        return what.__name__
    return f"{what!r}"[:100]


def _reader(what: object) -> _Reader:
    try:
        return _known_reader(what)
    except TypeError:  # An unhashable type cannot be a key.
        return _new_reader(what)


@lru_cache(maxsize=256)
def _known_reader(what: object) -> _Reader:
    return _new_reader(what)


def _new_reader(what: object) -> _Reader:
    if _is_pydantics(what):
        return _pydantic_reader(what)
    own_schema, own_decode = (
        getattr(what, name, None) for name in ("model_json_schema", "model_validate_json")
    )
    if isinstance(what, type) and callable(own_schema) and callable(own_decode):
        return _Reader(own_schema, own_decode)
    try:
        schema = msgspec_schema.schema_of(what)
    except (TypeError, ValueError, NotImplementedError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        return _pydantic_reader(what, error)
    return _Reader(
        lambda: schema, lambda text: msgspec.json.decode(text, type=what, dec_hook=msgspec_schema.paths)
    )


def _pydantic_reader(what: object, why: BaseException | None = None) -> _Reader:
    """Return a reader that uses pydantic. `why` is msgspec's error if msgspec was tried first."""
    try:
        # Imported here, because pydantic may not be installed.
        from mmengine.structured_output.types import pydantic_schema
    except ImportError as error:
        reason = str(why or error).partition("\n")[0]
        raise InvalidRequest(f"{_name(what)} has no JSON Schema: {reason}") from None
    adapter = pydantic_schema.adapter_of(what)
    return _Reader(lambda: pydantic_schema.schema_of(adapter), adapter.validate_json)


def _is_pydantics(what: object) -> bool:
    """Return whether a type contains classes or constraints from pydantic, which msgspec would ignore."""
    pending, seen = [what], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen or len(seen) >= MAX_TYPES:
            continue
        seen.add(id(each))
        if _is_made_for_pydantic(each):
            return True
        pending += typing.get_args(each)
        pending += getattr(each, "__metadata__", ())
        pending += _fields_of(each)
    return False


def _is_made_for_pydantic(each: object) -> bool:
    if hasattr(each, "__get_pydantic_core_schema__") or hasattr(each, "__pydantic_core_schema__"):
        return True
    modules = (getattr(each, "__module__", None), type(each).__module__)
    return any(isinstance(name, str) and name.partition(".")[0] in _OTHERS for name in modules)


def _fields_of(each: object) -> list[object]:
    """Return a class's field types, or [] for a class without fields."""
    has_fields = isinstance(each, type) and (
        is_dataclass(each) or typing.is_typeddict(each) or hasattr(each, "_fields")
    )
    if not has_fields:
        return []
    try:
        return list(typing.get_type_hints(each, include_extras=True).values())
    # An annotation cannot be resolved. msgspec or pydantic reports the error later.
    except (NameError, TypeError, AttributeError):
        return []


def _close_schema(schema: object) -> object:
    """Narrow a type's schema where the library leaves it too wide.

    Objects allow no additional properties, unless the type sets `additionalProperties`. A base64 string gets
    a pattern, and a pattern replaces each format that JSON Schema does not define. Raises InvalidRequest for
    formats that no pattern can express.
    """
    if not isinstance(schema, dict):
        return schema
    out = _map_subschemas(schema, _close_schema)
    if "properties" in out:
        out.setdefault("additionalProperties", False)
    if out.get("contentEncoding") == "base64" and out.get("type") == "string":
        out.setdefault("pattern", FORMAT_PATTERNS["base64"])
    known = out.get("format")
    if isinstance(known, str) and known in UNCHECKABLE:
        raise InvalidRequest(
            f"the type wants {UNCHECKABLE[known]}, which no schema can express; ask for a string"
        )
    if isinstance(known, str) and known in FORMAT_PATTERNS:
        del out["format"]
        of_text = known.startswith("base64") and "contentMediaType" not in out
        out.setdefault("pattern", ASCII_IN_BASE64 if of_text else FORMAT_PATTERNS[known])
    return out


def _drop_idle_unique(schema: Schema, root: Schema) -> Schema:
    """Drop `uniqueItems` from a set's schema if the keyword cannot be enforced and `minItems` is at most 1.

    Decoding then merges duplicate items, and the decoded set still satisfies `minItems`.
    """
    out = _map_subschemas(
        schema, lambda each: _drop_idle_unique(each, root) if isinstance(each, dict) else each
    )
    if out.get("uniqueItems") is not True or out.get("minItems", 0) > 1:
        return out
    try:
        normalize_schema({**({"$defs": root["$defs"]} if "$defs" in root else {}), **schema})
    except SchemaRefused:
        del out["uniqueItems"]
    return out


def _map_subschemas(schema: Schema, change: Callable[[object], object]) -> Schema:
    """Return the schema after replacing each direct subschema by the result of `change`."""
    out = dict(schema)
    for keyword, value in schema.items():
        if keyword in SUBSCHEMA:
            out[keyword] = change(value)
        elif keyword in SUBSCHEMA_LIST and isinstance(value, list):
            out[keyword] = [change(item) for item in value]
        elif keyword in SUBSCHEMA_MAP and isinstance(value, dict):
            out[keyword] = {name: change(item) for name, item in value.items()}
    return out

"""Python types as JSON Schemas, and answers back as those types.

What may be asked for: a schema (dict, true or false), anything msgspec knows (a Struct, a dataclass, a
TypedDict, list[int], …), anything pydantic knows (a model, list[Model], a TypeAdapter, Annotated with a
Field), or a class with pydantic's two methods. pydantic is imported only for types that need it.
"""

import json
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
from mmengine.structured_output.types import msgspec_schema
from mmengine.structured_output.types.type_patterns import (
    ASCII_IN_BASE64,
    FORMAT_PATTERNS,
    UNCHECKABLE,
    Schema,
)

MAX_TYPES = 10_000  # that are looked at for pydantic's among them
_OTHERS = ("pydantic", "annotated_types")


class _Reader(NamedTuple):
    """How one type is asked for, and how an answer becomes one."""

    schema: Callable[[], object]
    decode: Callable[[str], object]


def schema_of(what: object) -> dict | bool:
    """The JSON Schema of what is asked for; InvalidRequest says why there is none. An answer of it is what
    `decode` takes, but for rules that the type states in code of its own (validators)."""
    if isinstance(what, dict | bool):
        return what
    schema = _reader(what).schema()
    try:
        narrowed = _narrowed(schema)
        return _without_idle_sets(narrowed, narrowed) if isinstance(narrowed, dict) else bool(narrowed)
    except RecursionError:
        raise InvalidRequest(f"{_name(what)} has no JSON Schema: it is nested too deep") from None


def decode(text: str, what: object) -> object:
    """The answer as what was asked for: for a schema what `json.loads` gives, for a type a validated object.

    RequestFailed when the text is not that: it was cut (finish_reason "length"), or the type has rules
    of its own that no schema says.
    """
    try:
        return json.loads(text) if isinstance(what, dict | bool) else _reader(what).decode(text)
    except ValueError as error:  # all libraries' errors are ValueErrors
        why = " ".join(str(error).split())
        raise RequestFailed(f"the answer is no {_name(what)}: {why:.500}") from None


def _name(what: object) -> str:
    if isinstance(what, dict | bool):
        return "JSON"
    if isinstance(what, type) and not typing.get_args(what):
        return what.__name__
    return f"{what!r}"[:100]


def _reader(what: object) -> _Reader:
    try:
        return _known_reader(what)
    except TypeError:  # it cannot be a key
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
    """`why`: msgspec's reason, where it was asked first."""
    try:
        from mmengine.structured_output.types import pydantic_schema  # it may not be installed
    except ImportError as error:
        reason = str(why or error).partition("\n")[0]
        raise InvalidRequest(f"{_name(what)} has no JSON Schema: {reason}") from None
    adapter = pydantic_schema.adapter_of(what)
    return _Reader(lambda: pydantic_schema.schema_of(adapter), adapter.validate_json)


def _is_pydantics(what: object) -> bool:
    """Whether pydantic's classes or constraints are somewhere in a type: others would pass over them."""
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
    """The types of the fields of a class that has some."""
    has_fields = isinstance(each, type) and (
        is_dataclass(each) or typing.is_typeddict(each) or hasattr(each, "_fields")
    )
    if not has_fields:
        return []
    try:
        return list(typing.get_type_hints(each, include_extras=True).values())
    except (NameError, TypeError, AttributeError):  # of a name that cannot be found: whoever reads it says so
        return []


def _narrowed(schema: object) -> object:
    """The schema of a type with what its library leaves open closed.

    An object has no keys but its fields, where the type does not say otherwise: nobody would get the others.
    Bytes are base64, which is said only as an annotation, by a pattern; and so are formats that JSON Schema
    does not know. Raises InvalidRequest for those that no pattern describes.
    """
    if not isinstance(schema, dict):
        return schema
    out = _mapped(schema, _narrowed)
    if "properties" in out:
        out.setdefault("additionalProperties", False)
    if out.get("contentEncoding") == "base64" and out.get("type") == "string":
        out.setdefault("pattern", FORMAT_PATTERNS["base64"])
    known = out.get("format")
    if isinstance(known, str) and known in UNCHECKABLE:
        raise InvalidRequest(f"the type wants {UNCHECKABLE[known]}, which no schema says; ask for a string")
    if isinstance(known, str) and known in FORMAT_PATTERNS:
        del out["format"]
        of_text = known.startswith("base64") and "contentMediaType" not in out
        out.setdefault("pattern", ASCII_IN_BASE64 if of_text else FORMAT_PATTERNS[known])
    return out


def _without_idle_sets(schema: Schema, root: Schema) -> Schema:
    """Of sets, `uniqueItems` only where it can be enforced, or where it decides: a set of no least size takes
    what comes twice."""
    out = _mapped(schema, lambda each: _without_idle_sets(each, root) if isinstance(each, dict) else each)
    if out.get("uniqueItems") is not True or out.get("minItems", 0) > 1:
        return out
    try:
        normalize_schema({**({"$defs": root["$defs"]} if "$defs" in root else {}), **schema})
    except SchemaRefused:
        del out["uniqueItems"]
    return out


def _mapped(schema: Schema, change: Callable[[object], object]) -> Schema:
    """A copy whose subschemas are changed."""
    out = dict(schema)
    for keyword, value in schema.items():
        if keyword in SUBSCHEMA:
            out[keyword] = change(value)
        elif keyword in SUBSCHEMA_LIST and isinstance(value, list):
            out[keyword] = [change(item) for item in value]
        elif keyword in SUBSCHEMA_MAP and isinstance(value, dict):
            out[keyword] = {name: change(item) for name, item in value.items()}
    return out

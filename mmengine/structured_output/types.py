"""Python types as JSON Schemas, and answers back as those types.

What may be asked for: a schema (dict, true or false), anything msgspec knows (a Struct, a dataclass, a
TypedDict, list[int], …), or a class with pydantic's two methods; pydantic itself is never imported.
"""

import json
from collections.abc import Callable

import msgspec

from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.structured_output.json_schema.keywords import SUBSCHEMA, SUBSCHEMA_LIST, SUBSCHEMA_MAP

BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


def schema_of(what: object) -> dict | bool:
    """The JSON Schema of what is asked for; InvalidRequest says why there is none."""
    if isinstance(what, dict | bool):
        return what
    pydantic = _pydantic(what, "model_json_schema")
    if pydantic:
        return _narrowed(pydantic())  # type: ignore[return-value]
    try:
        return _narrowed(msgspec.json.schema(what))  # type: ignore[return-value]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InvalidRequest(f"{_name(what)} has no JSON Schema: {error}") from None


def decode(text: str, what: object) -> object:
    """The answer as what was asked for: for a schema what `json.loads` gives, for a type a validated object.

    RequestFailed when the text is not that: it was cut (finish_reason "length"), or the type has rules
    of its own that no schema says.
    """
    try:
        if isinstance(what, dict | bool):
            return json.loads(text)
        pydantic = _pydantic(what, "model_validate_json")
        return pydantic(text) if pydantic else msgspec.json.decode(text, type=what)
    except ValueError as error:  # both libraries' errors are ValueErrors
        raise RequestFailed(f"the answer is no {_name(what)}: {error}") from None


def _pydantic(what: object, method: str) -> Callable[..., object] | None:
    return getattr(what, method, None) if isinstance(what, type) else None


def _name(what: object) -> str:
    return "JSON" if isinstance(what, dict | bool) else getattr(what, "__name__", repr(what))


def _narrowed(schema: object) -> object:
    """The schema of a type with what its library leaves open closed.

    An object has no keys but its fields, where the type does not say otherwise: nobody would get the others.
    Bytes are base64, which msgspec says only as an annotation, by a pattern.
    """
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for keyword, value in schema.items():
        if keyword in SUBSCHEMA:
            out[keyword] = _narrowed(value)
        elif keyword in SUBSCHEMA_LIST:
            out[keyword] = [_narrowed(item) for item in value]
        elif keyword in SUBSCHEMA_MAP:
            out[keyword] = {name: _narrowed(item) for name, item in value.items()}
    if "properties" in out:
        out.setdefault("additionalProperties", False)
    if out.get("contentEncoding") == "base64" and out.get("type") == "string":
        out.setdefault("pattern", BASE64)
    return out

"""Checks fields in a client's response_format or grammar, and normalizes the schemas in them. Errors name the
field that is invalid.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal

import msgspec

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.request import check_unicode
from mmengine.structured_output.json_schema.normalization import Bounds, NormalizedSchema, normalize_schema
from mmengine.structured_output.json_schema.reading.loading import encode

# A function that normalizes a schema. Arguments: schema (JSON text), bounds, documents for references (JSON
# text), and whether unknown keywords are refused.
Normalizer = Callable[[bytes, Bounds, bytes, bool], NormalizedSchema]
_work_out: ContextVar[Normalizer | None] = ContextVar("work_out", default=None)
# Size in bytes, for a schema together with its documents. Normalizing a larger schema takes tens of
# milliseconds.
LARGE = 32 * 2**10
Truncation = Literal["length", "close"]
MAX_URI = 2_000  # Maximum length of a document's URI.


def check_mapping(where: FieldPath, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{FIELD} must be an object, not {shown(value)}", path=where)
    return value


def refuse_unknown_fields(where: FieldPath, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(
                f"{FIELD} has the unknown field {shown(name)}; supported: {', '.join(known)}", path=where
            )


def check_string(where: FieldPath, value: object, max_chars: int) -> str:
    if not isinstance(value, str) or len(value) > max_chars:
        raise InvalidRequest(f"{FIELD} must be a string of at most {max_chars} characters", path=where)
    check_unicode(where, value)
    return value


def truncation_of(where: FieldPath, given: Mapping[str, Any]) -> tuple[dict[str, Any], Truncation]:
    """Return two values: the fields in `given` except on_truncation, and the value of on_truncation."""
    given = dict(check_mapping(where, given))
    match given.pop("on_truncation", None):
        case None | "length":
            return given, "length"
        case "close":
            return given, "close"
        case found:
            raise InvalidRequest(
                f"{FIELD} must be length or close, not {shown(found)}", path=where / "on_truncation"
            )


msgspec.json.Decoder(Bounds)  # Built at import: msgspec crashes if two threads are the first to use a type.


def bounds_of(where: FieldPath, given: object) -> Bounds:
    """Return the bounds that the field `given` requests.

    None means the default bounds, and False means no bounds. An object sets the fields that it names.
    """
    if given is False:
        return Bounds.off()
    try:
        return Bounds() if given is None else msgspec.convert(given, Bounds)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{FIELD} cannot be used: {error}", path=where) from None


def documents_of(where: FieldPath, given: object) -> Mapping[str, object]:
    """Return the documents that a schema's $ref may refer to, keyed by URI.

    If `given` is None, there are no documents.
    """
    documents = {} if given is None else check_mapping(where, given)
    for uri in documents:
        if not isinstance(uri, str) or len(uri) > MAX_URI:
            raise InvalidRequest(f"{FIELD} must have keys (URIs) of at most {MAX_URI} characters", path=where)
        check_unicode(where, uri)
    return documents


def check_flag(where: FieldPath, value: object) -> bool:
    """Return a boolean field's value. None counts as False."""
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{FIELD} must be true or false, not {shown(value)}", path=where)
    return bool(value)


@contextmanager
def normalize_large_by(work_out: Normalizer | None) -> Iterator[None]:
    """Inside the `with` block, this thread passes schemas of more than LARGE bytes to `work_out`.

    `work_out` takes the arguments of `_normalize_text`. With None, this thread normalizes all schemas.
    """
    token = _work_out.set(work_out)
    try:
        yield
    finally:
        _work_out.reset(token)


def normalize_cached(
    schema: Any, bounds: Bounds, schemas: Mapping[str, object] | None = None, strict_keywords: bool = False
) -> NormalizedSchema:
    """Return the normalized schema.

    The result is cached, since many lines in a batch share one schema.
    """
    try:
        text = schema if isinstance(schema, bytes) else encode(schema).encode()
        store = encode(schemas).encode() if schemas else b"{}"
    except (TypeError, ValueError, RecursionError):  # Normalization reports which part is not JSON.
        return normalize_schema(schema, bounds, schemas, strict_keywords)
    return _normalize_text(text, bounds, store, strict_keywords)


@lru_cache(maxsize=64)
def _normalize_text(text: bytes, bounds: Bounds, store: bytes, strict_keywords: bool) -> NormalizedSchema:
    work_out = _work_out.get() if len(text) + len(store) > LARGE else None
    if work_out is not None:
        return work_out(text, bounds, store, strict_keywords)
    return normalize_schema(text, bounds, json.loads(store), strict_keywords)

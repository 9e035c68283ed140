"""Converts msgspec's decoding errors to data: the path to the invalid value, the kind of error, and the range
of a number. Also recognises data in UTF-16.

msgspec reports an invalid value only as an English sentence. This module alone parses these sentences.
"""

import codecs
import re
from collections.abc import Mapping
from typing import NamedTuple, get_args, get_type_hints

import msgspec

from mmengine.errors import ErrorCode, FieldPath

_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$(?:\.)?(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]*)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_RANGE = re.compile(r"Expected `(?:int|float)` [<>]=? \S+")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")


class DecodeError(NamedTuple):
    """A value that a msgspec decoder refused, and why.

    `code`: MISSING_FIELD, INVALID_TYPE, or INVALID_VALUE if msgspec names no path. `text`: the violated rule,
    such as "expected int, got str". `path` contains "" for an index or key that msgspec does not name.
    """

    code: ErrorCode
    path: FieldPath
    text: str


class OutOfRange(NamedTuple):
    """A field whose `value` is outside the range [low, high]."""

    name: str
    low: int | float
    high: int | float
    value: object


def decode_error(error: msgspec.ValidationError) -> DecodeError:
    """Parse a msgspec error into the code, the path and the rule."""
    sentence = str(error)
    if missing := _MISSING.fullmatch(sentence):
        return DecodeError(ErrorCode.MISSING_FIELD, _path(missing[2] or "") / missing[1], "is missing")
    if found := _PLACE.fullmatch(sentence):
        rule = found[1].replace("`", "")
        return DecodeError(ErrorCode.INVALID_TYPE, _path(found[2]), f"{rule[:1].lower()}{rule[1:]}")
    return DecodeError(ErrorCode.INVALID_VALUE, FieldPath(), sentence)


def utf16_hint(data: bytes) -> str:
    """Return an error text if the data begin with the byte order mark of UTF-16, else ""."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "it begins with the byte order mark of UTF-16; save it as UTF-8" if is_utf16 else ""


def _path(place: str) -> FieldPath:
    """Return the keys and indices in msgspec's path, such as `a[...].b`."""
    steps = ((each[1], each[2]) for each in _STEP.finditer(place))
    return FieldPath(*(key or (int(index) if index.isdigit() else "") for index, key in steps))


def out_of_range(
    error: msgspec.ValidationError, values: Mapping[str, object], struct: type[msgspec.Struct]
) -> OutOfRange | None:
    """Return the field that is out of range, or None if `error` has another cause.

    `error` must come from converting `values` to `struct`. The range is given by `ge` and `le` in the Meta
    annotation of the field's type.
    """
    found = _PLACE.fullmatch(str(error))
    path = () if found is None or not _RANGE.fullmatch(found[1]) else _path(found[2])
    if len(path) != 1 or not isinstance(path[0], str):
        return None
    name = path[0]
    hint = get_type_hints(struct, include_extras=True)[name]
    bounds = next(each for each in get_args(hint) if isinstance(each, msgspec.Meta))
    assert bounds.ge is not None and bounds.le is not None  # all ranges in this project have both bounds
    return OutOfRange(name, bounds.ge, bounds.le, values[name])

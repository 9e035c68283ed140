"""msgspec's decoder errors as data.

msgspec reports an invalid value by a sentence alone. This adapter is the only module that parses such
sentences. The result is the value's place and the error's kind.
"""

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
    """What a decoder refused. `code` is MISSING_FIELD, INVALID_TYPE, or INVALID_VALUE for an error of the
    whole value, whose place msgspec leaves out. `text`: the rule, such as "expected int, got str". An index
    or a key that msgspec does not tell is "" in `path`."""

    code: ErrorCode
    path: FieldPath
    text: str


class OutOfRange(NamedTuple):
    """A field whose `value` does not lie in [low, high]."""

    name: str
    low: int | float
    high: int | float
    value: object


def decode_error(error: msgspec.ValidationError) -> DecodeError:
    """Return the place and the kind of an error of msgspec."""
    sentence = str(error)
    if missing := _MISSING.fullmatch(sentence):
        return DecodeError(ErrorCode.MISSING_FIELD, _path(missing[2] or "") / missing[1], "is missing")
    if found := _PLACE.fullmatch(sentence):
        rule = found[1].replace("`", "")
        return DecodeError(ErrorCode.INVALID_TYPE, _path(found[2]), f"{rule[:1].lower()}{rule[1:]}")
    return DecodeError(ErrorCode.INVALID_VALUE, FieldPath(), sentence)


def _path(place: str) -> FieldPath:
    """Return the keys of a place as msgspec writes it, such as `a[...].b`."""
    steps = ((each[1], each[2]) for each in _STEP.finditer(place))
    return FieldPath(*(key or (int(index) if index.isdigit() else "") for index, key in steps))


def out_of_range(
    error: msgspec.ValidationError, values: Mapping[str, object], struct: type[msgspec.Struct]
) -> OutOfRange | None:
    """Return the field that is out of its range, or None if `error` says something else.

    `error` was raised when `values` became a `struct`. The bounds are `ge` and `le` of the field's Meta."""
    found = _PLACE.fullmatch(str(error))
    path = () if found is None or not _RANGE.fullmatch(found[1]) else _path(found[2])
    if len(path) != 1 or not isinstance(path[0], str):
        return None
    name = path[0]
    hint = get_type_hints(struct, include_extras=True)[name]
    bounds = next(each for each in get_args(hint) if isinstance(each, msgspec.Meta))
    assert bounds.ge is not None and bounds.le is not None  # every range here has two ends
    return OutOfRange(name, bounds.ge, bounds.le, values[name])

"""Fields of structs that say their ranges themselves, by msgspec.Meta: which one is out of it."""

import re
from collections.abc import Mapping
from typing import NamedTuple, get_args, get_type_hints

import msgspec

_OF_A_RANGE = re.compile(r"Expected `(?:int|float)` [<>]=? \S+ - at `\$\.(\w+)`")


class OutOfRange(NamedTuple):
    """A field whose `value` does not lie in [low, high]."""

    name: str
    low: int | float
    high: int | float
    value: object


def out_of_range(
    error: msgspec.ValidationError, values: Mapping[str, object], struct: type[msgspec.Struct]
) -> OutOfRange | None:
    """What `error` says, raised when `values` became a `struct`: the field, whose bounds are `ge` and `le` of
    its Meta. None where it says something else."""
    found = _OF_A_RANGE.fullmatch(str(error))
    if found is None:
        return None
    name = found[1]
    hint = get_type_hints(struct, include_extras=True)[name]
    bounds = next(each for each in get_args(hint) if isinstance(each, msgspec.Meta))
    assert bounds.ge is not None and bounds.le is not None  # every range here has two ends
    return OutOfRange(name, bounds.ge, bounds.le, values[name])

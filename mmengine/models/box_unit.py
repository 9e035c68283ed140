"""The unit in which a model family writes boxes."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from mmengine.errors import InvalidRequest


class BoxUnit(NamedTuple):
    """`kind`: "thousandths" of the image's sides, or "pixels" in the resized image. The resized
    image's sides are multiples of `patch` pixels.
    """

    kind: Literal["thousandths", "pixels"]
    patch: int = 0


def unit_of(model_type: str, units: Mapping[str, BoxUnit]) -> BoxUnit:
    """Return a model family's unit. Raises InvalidRequest for an unknown family."""
    found = units.get(model_type)
    if found is None:
        known = f"known are {', '.join(units)}" if units else "its plugin names none"
        raise InvalidRequest(f"the boxes of a model of the type {model_type!r} have an unknown unit; {known}")
    return found

"""The unit in which a model family writes boxes, and a box in pixels."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from mmengine.errors import InvalidRequest


class BoxUnit(NamedTuple):
    """A unit for box coordinates. `kind`: "thousandths" of the image's sides, or "pixels" in the resized
    image. The resized image's sides are multiples of `patch` pixels.
    """

    kind: Literal["thousandths", "pixels"]
    patch: int = 0


class Box(msgspec.Struct, frozen=True, omit_defaults=True):
    """A box in an answer. `pixels`: left, top, right and bottom in the stored image (before EXIF rotation),
    clipped to the image; None if the answer's value is no box. `problem`: why the answer's value is wrong; ""
    for a box that lies in the image.
    """

    pixels: tuple[float, float, float, float] | None
    problem: str = ""


def unit_of(model_type: str, units: Mapping[str, BoxUnit]) -> BoxUnit:
    """Return a model family's unit. Raises InvalidRequest for an unknown family."""
    found = units.get(model_type)
    if found is None:
        known = f"known are {', '.join(units)}" if units else "its plugin names none"
        raise InvalidRequest(f"the boxes of a model of the type {model_type!r} have an unknown unit; {known}")
    return found


def unknown_unit() -> BoxUnit:
    """Raise InvalidRequest, for a server that does not know its model's unit."""
    return unit_of("unknown", {})

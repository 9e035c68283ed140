"""Finds the boxes in a model's answer, and converts their coordinates to pixels in the image file.

Model families write boxes in different units. Each model plugin says in `box_units` which unit its models
use. The model sees the image rotated by its EXIF orientation and resized. The coordinates that this module
returns are pixels of the stored image.
"""

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, Image

from mmengine.errors import InvalidMedia
from mmengine.models.box_unit import Box, BoxUnit
from mmengine.structured_output.json_pointer import join_pointer

KEY = "bbox_2d"  # The key under which models write boxes.
MARK = "x-mmengine-box"  # Schema keyword that declares a value to be a box.
_MAX_DEPTH = 64


class ImageFrame(NamedTuple):
    """An image file's stored size, its EXIF orientation (1 to 8), and the size that the model sees."""

    width: int
    height: int
    orientation: int = 1
    resized_width: int = 0
    resized_height: int = 0

    @property
    def is_turned(self) -> bool:
        """Whether the upright image's width is the stored image's height."""
        return self.orientation >= 5


def open_image(source: str | Path | bytes) -> Image.Image:
    """Open an image file. Raises InvalidMedia."""
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Exception as error:  # Pillow's parsers raise nearly any exception on invalid bytes.
        raise InvalidMedia(f"the image cannot be read: {error}") from None


def frame_of(image: Image.Image) -> ImageFrame:
    """Return an image file's frame. Damaged EXIF data are ignored."""
    orientation = 1
    with suppress(Exception):
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return ImageFrame(*image.size, orientation if orientation in range(1, 9) else 1)


def box_pointers(
    value: object, is_marked: Mapping[str, bool], pointer: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield (JSON pointer, value) for each box in an answer. A value is a box if its key is KEY, or if
    `is_marked` maps its pointer to True.
    """
    pending = [(pointer, "", value)]
    while pending:
        place, key, each = pending.pop()
        if key == KEY or is_marked.get(place):
            yield place, each
        elif isinstance(each, dict) and place.count("/") < _MAX_DEPTH:
            pending += [(join_pointer(place, name), name, each[name]) for name in reversed(each)]
        elif isinstance(each, list) and place.count("/") < _MAX_DEPTH:
            pending += [(join_pointer(place, index), "", each[index]) for index in reversed(range(len(each)))]


def restore(value: object, unit: BoxUnit, frame: ImageFrame) -> Box:
    """Return an answer's box in the stored image's pixels."""
    if (
        not isinstance(value, list)
        or len(value) != 4
        or not all(type(each) in (int, float) and math.isfinite(each) for each in value)
    ):
        return Box(None, "a box has four finite numbers: left, top, right, bottom")
    left, top, right, bottom = map(float, value)
    upright = (frame.height, frame.width) if frame.is_turned else (frame.width, frame.height)
    limits = (frame.resized_width, frame.resized_height) if unit.kind == "pixels" else (1000, 1000)
    problem = ""
    if left > right or top > bottom:
        problem = f"left {left:g} to right {right:g}, top {top:g} to bottom {bottom:g} is in reverse order"
    elif not (left >= 0 and right <= limits[0] and top >= 0 and bottom <= limits[1]):
        problem = f"{value} reaches beyond 0 to {limits[0]} across or 0 to {limits[1]} down"
    scale_x, scale_y = upright[0] / limits[0], upright[1] / limits[1]
    corners = [
        _stored(min(max(x * scale_x, 0), upright[0]), min(max(y * scale_y, 0), upright[1]), frame)
        for x, y in ((left, top), (right, bottom))
    ]
    (x0, y0), (x1, y1) = corners
    return Box((min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)), problem)


def _stored(x: float, y: float, frame: ImageFrame) -> tuple[float, float]:
    """Return where the upright image's point (x, y) lies in the stored image."""
    width, height = frame.width, frame.height
    match frame.orientation:
        case 2:
            return width - x, y
        case 3:
            return width - x, height - y
        case 4:
            return x, height - y
        case 5:
            return y, x
        case 6:
            return y, height - x
        case 7:
            return width - y, height - x
        case 8:
            return width - y, x
    return x, y

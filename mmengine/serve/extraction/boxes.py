"""Converts the boxes in an extraction's answers to positions in the pictures, and writes them to a file."""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mmengine.errors import InvalidMedia
from mmengine.events.file_system import write_whole
from mmengine.models.box_unit import Box, BoxUnit
from mmengine.processing.media.boxes import KEY, MARK, ImageFrame, frame_of, open_image, restore
from mmengine.serve.engine.engine import Engine
from mmengine.serve.extraction.results import PlacedBox, Result, RowBoxes

_TURNED_BACK = {
    6: 8,
    8: 6,
}  # Maps an EXIF orientation to the orientation that undoes it. All other orientations undo themselves.


def has_boxes(schema: bytes) -> bool:
    """Return whether a schema may describe boxes."""
    return any(f'"{word}"'.encode() in schema for word in (KEY, MARK))


def write_boxes(engine: Engine, results: Iterable[Result], schema: bytes, folder: Path, out: Path) -> None:
    """Write each answer's boxes to `out`, except for answers about several pictures. Picture paths are
    relative to `folder`.

    Raises InvalidRequest if the unit of the model's boxes is unknown.
    """
    decoded, lines = json.loads(schema), []
    for result in results:
        if result.text and len(result.pictures) == 1:
            path = folder / result.pictures[0]
            try:
                boxes = engine.boxes(result.value, decoded, path)
                with open_image(path) as image:
                    frame = frame_of(image)
            except InvalidMedia:  # The file was deleted or changed after the request was answered.
                continue
            placed = {pointer: _placed(box, frame) for pointer, box in boxes.items()}
            lines.append(msgspec.json.encode(RowBoxes(result.request, placed)) + b"\n")
    write_whole(out, b"".join(lines))


def _placed(box: Box, frame: ImageFrame) -> PlacedBox:
    """Return a box with its position in the upright picture."""
    if box.pixels is None:
        return PlacedBox(None, None, box.problem)
    width, height = (frame.height, frame.width) if frame.is_turned else (frame.width, frame.height)
    back = ImageFrame(
        width, height, _TURNED_BACK.get(frame.orientation, frame.orientation), frame.width, frame.height
    )
    pixels = restore(list(box.pixels), BoxUnit("pixels", 1), back).pixels
    assert pixels is not None  # `restore` returns None only if the value is not four numbers.
    left, top, right, bottom = pixels
    return PlacedBox(box.pixels, (left / width, top / height, right / width, bottom / height), box.problem)

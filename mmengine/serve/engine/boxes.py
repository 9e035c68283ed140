"""Converts the boxes in an engine's answers to pixels in the image file."""

import json
from pathlib import Path

from PIL import Image

from mmengine.checkpoint.model_files import read_model_json
from mmengine.models.box_unit import Box, BoxUnit, unit_of
from mmengine.models.plugin import ModelPlugin, Processor
from mmengine.processing.media.boxes import MARK, ImageFrame, box_pointers, frame_of, open_image, restore
from mmengine.structured_output.field_confidence.schema_values import has_keyword
from mmengine.structured_output.field_confidence.spans import Path as JsonPath
from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.types.types import schema_of

ImageSource = str | Path | bytes | Image.Image


def answer_boxes(
    value: object, schema: object, image: ImageSource, unit: BoxUnit, processor: Processor
) -> dict[str, Box]:
    """Return the boxes in an answer about one image, keyed by JSON pointer.

    `unit`: how the model writes boxes. Raises InvalidMedia for an unreadable image.
    """
    return boxes_in(value, json.dumps(schema_of(schema)), unit, image_frame(image, unit, processor))


def boxes_in(value: object, written: str, unit: BoxUnit, frame: ImageFrame) -> dict[str, Box]:
    """Return the boxes in an answer about one image. `written`: the schema's JSON text. `frame`: the image's
    sizes and orientation.
    """
    marked = {join_pointer("", *path): True for path in _paths(value) if has_keyword(written, path, MARK)}
    return {pointer: restore(box, unit, frame) for pointer, box in box_pointers(value, marked)}


def image_frame(
    image: ImageSource,
    unit: BoxUnit,
    processor: Processor,
    part: dict[str, object] | None = None,
    media_options: dict[str, object] | None = None,
) -> ImageFrame:
    """Return an image's sizes and orientation. The resized width and height are set only if the model writes
    boxes in the resized image's pixels.

    `part`, `media_options`: the image's message part and the prompt's options, which may limit the image's
    size. Raises InvalidMedia for an unreadable image.
    """
    opened = image if isinstance(image, Image.Image) else open_image(image)
    try:
        frame = frame_of(opened)
        if unit.kind == "pixels":
            placed = [] if part is not None else [opened]
            messages = [{"role": "user", "content": [part or {"type": "image"}]}]
            (item,) = processor.prepare(messages, images=placed, media_options=media_options).media
            _, rows, columns = item.item.grid
            frame = frame._replace(resized_width=columns * unit.patch, resized_height=rows * unit.patch)
    finally:
        if opened is not image:
            opened.close()
    return frame


def _paths(value: object) -> list[JsonPath]:
    """Return the path to each array in a JSON value."""
    found: list[JsonPath] = []
    pending: list[tuple[JsonPath, object]] = [((), value)]
    while pending:
        path, each = pending.pop()
        if isinstance(each, dict):
            pending += [((*path, key), child) for key, child in each.items()]
        elif isinstance(each, list):
            found.append(path)
            pending += [((*path, index), child) for index, child in enumerate(each)]
    return found


def box_unit_of(folder: Path, plugin: ModelPlugin) -> BoxUnit:
    """Return how the folder's model writes boxes. Raises InvalidRequest if the plugin does not declare it."""
    return unit_of(model_type_of(folder), getattr(plugin, "box_units", {}))


def model_type_of(folder: Path) -> str:
    """Return a checkpoint's model_type. Raises ModelError for a folder without a configuration."""
    return str(read_model_json(folder, "config.json").get("model_type"))

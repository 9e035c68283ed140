"""Tests that boxes in answers are converted to pixels of the stored image: EXIF orientation and resizing are
undone.
"""

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from mmengine.errors import InvalidMedia, InvalidRequest
from mmengine.models.box_unit import Box, BoxUnit, unit_of
from mmengine.processing.media.boxes import ImageFrame, frame_of, restore
from mmengine.processing.media.images import load_rgb
from mmengine.processing.media.sources import Access
from mmengine.serve.engine.boxes import answer_boxes
from mmengine.serve.engine.engine import Engine

THOUSANDTHS, PIXELS = BoxUnit("thousandths"), BoxUnit("pixels", 14)
MARKED = {"type": "array", "items": {"type": "integer"}, "x-mmengine-box": True}
SCHEMA = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/box"}, "rows": {"type": "array", "items": {"type": "object"}}},
    "$defs": {"box": MARKED},
}


def stored(orientation, width=80, height=50):
    """Return a PNG's bytes with a black rectangle from (10, 20) to (30, 25). `orientation`: EXIF value."""
    pixels = np.full((height, width, 3), 255, np.uint8)
    pixels[20:25, 10:30] = 0
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(pixels).save(data := io.BytesIO(), "PNG", exif=exif)
    return data.getvalue()


def dark_box(image):
    rows, columns = np.nonzero(np.asarray(image.convert("L")) < 128)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("unit", [THOUSANDTHS, PIXELS])
def test_a_box_of_the_upright_image_is_found_in_the_stored_one(orientation, unit):
    image = Image.open(io.BytesIO(stored(orientation)))
    upright = ImageOps.exif_transpose(image)
    left, top, right, bottom = dark_box(upright)
    frame = frame_of(image)._replace(resized_width=224, resized_height=140)
    size = (224, 140) if unit.kind == "pixels" else (1000, 1000)
    said = [left / upright.width, top / upright.height, right / upright.width, bottom / upright.height]
    said = [float(part * side) for part, side in zip(said, size * 2, strict=True)]
    box = restore(said, unit, frame)
    assert box.problem == "" and box.pixels == pytest.approx((10, 20, 30, 25))


@pytest.mark.parametrize(
    "value, words, pixels",
    [
        ([0, 0, 1000, 1000], "", (0, 0, 80, 50)),
        ([100, 0, 1001, 500], "beyond 0 to 1000", (8, 0, 80, 25)),
        ([-5, 0, 500, 500], "beyond 0 to 1000", (0, 0, 40, 25)),
        ([500, 0, 100, 500], "reverse order", (8, 0, 40, 25)),
        ([1, 2, 3], "four finite numbers", None),
        ([1, 2, 3, True], "four finite numbers", None),
        ([1, 2, 3, float("nan")], "four finite numbers", None),
        ("1,2,3,4", "four finite numbers", None),
    ],
)
def test_boxes_outside_the_image_say_what_is_wrong(value, words, pixels):
    box = restore(value, THOUSANDTHS, ImageFrame(80, 50))
    assert words in box.problem and bool(words) == bool(box.problem)
    assert box.pixels is None if pixels is None else box.pixels == pytest.approx(pixels)


def test_an_unknown_family_is_refused():
    assert unit_of("a", {"a": PIXELS, "b": THOUSANDTHS}) == PIXELS
    with pytest.raises(InvalidRequest, match="'c' have an unknown unit; known are a, b"):
        unit_of("c", {"a": PIXELS, "b": THOUSANDTHS})
    with pytest.raises(InvalidRequest, match="its plugin names none"):
        unit_of("c", {})


@pytest.mark.parametrize("name", ["mmengine_qwen3_vl", "mmengine_transformers"])
def test_plugins_name_units(name):
    units = pytest.importorskip(name).plugin.box_units
    assert units and all(isinstance(unit, BoxUnit) for unit in units.values())
    assert all(bool(unit.patch) == (unit.kind == "pixels") for unit in units.values())


class Patches:
    """A processor whose images have a grid of 10 x 16 patches."""

    def prepare(self, messages, *, images, media_options):
        class Item:
            grid = (1, 10, 16)

        class Medium:
            item = Item

        class Prepared:
            media = (Medium,)

        return Prepared


def test_boxes_of_an_answer_are_found_by_their_key_and_by_the_schema():
    value = {
        "at": [0, 0, 500, 1000],
        "rows": [{"bbox_2d": [0, 0, 1000, 500], "n/m": {"bbox_2d": 3}}, {"at": [1]}],
    }
    found = answer_boxes(value, SCHEMA, stored(1), THOUSANDTHS, None)
    assert found == {
        "/at": Box((0, 0, 40, 50)),
        "/rows/0/bbox_2d": Box((0, 0, 80, 25)),
        "/rows/0/n~1m/bbox_2d": Box(None, "a box has four finite numbers: left, top, right, bottom"),
    }
    (box,) = answer_boxes({"bbox_2d": [0, 0, 112, 70]}, True, stored(1), PIXELS, Patches()).values()
    assert box == Box((0, 0, 40, 25))  # the model sees 224 x 140 pixels
    with pytest.raises(InvalidMedia, match="cannot be read"):
        answer_boxes(value, SCHEMA, b"no image", THOUSANDTHS, None)


def test_damaged_exif_data_do_not_rotate_a_box():
    """The image itself decodes, so the model sees the pixels without rotation."""
    Image.new("RGB", (80, 50)).save(data := io.BytesIO(), "PNG", exif=b"Exif\0\0damaged!")
    (box,) = answer_boxes({"bbox_2d": [0, 0, 500, 500]}, True, data.getvalue(), THOUSANDTHS, None).values()
    assert load_rgb(data.getvalue(), Access(), "the image").size == (80, 50)
    assert box == Box((0, 0, 40, 25))


def test_an_image_with_too_many_pixels_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InvalidMedia, match="cannot be read"):
        answer_boxes({}, True, stored(1), THOUSANDTHS, None)


def test_an_engine_knows_the_family_of_its_model():
    pytest.importorskip("mmengine_shapes")
    number = {"type": "integer", "minimum": 0, "maximum": 1000}
    box = {"type": "array", "items": number, "minItems": 4, "maxItems": 4, "x-mmengine-box": True}
    with Engine() as engine:
        value = engine.generate_json("Where is it?", box, max_tokens=200)
        (found,) = engine.boxes(value, box, Image.new("RGB", (100, 50))).values()
    assert len(value) == 4 and all(0 <= each <= 100 for each in found.pixels)

"""Tests that damaged files are either decoded, or refused with a one-line error."""

import warnings

import numpy as np
import pytest
from test_images import PLACE as IMAGE_PLACE
from test_images import encoded, picture
from test_video_files import PLACE as VIDEO_PLACE
from test_video_files import record

from mmengine.errors import InvalidMedia

IMAGES = {form: encoded(picture(60, 40), form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
VIDEOS = {form: record(form, count=12) for form in ("mp4", "avi", "matroska")}


def damaged(data, rng):
    data = bytearray(data)
    for _ in range(rng.integers(1, 12)):
        data[rng.integers(0, len(data) if rng.random() < 0.5 else 200)] = rng.integers(0, 256)
    if rng.random() < 0.3:
        del data[rng.integers(0, len(data)) :]
    return bytes(data)


def outcome(call):
    try:
        call()
    except InvalidMedia as error:
        message = str(error)
        assert "\n" not in message and " at 0x" not in message and len(message) < 500
        return "refused"
    return "taken"


@pytest.mark.parametrize("form", IMAGES)
def test_damaged_images(processor, form):
    rng = np.random.default_rng(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about damaged metadata.
        results = {
            outcome(lambda: processor.prepare_text(IMAGE_PLACE, images=[damaged(IMAGES[form], rng)]))
            for _ in range(150)
        }
    assert "refused" in results


@pytest.mark.parametrize("form", VIDEOS)
def test_damaged_videos(processor, form):
    rng = np.random.default_rng(6)
    results = {
        outcome(lambda: processor.prepare_text(VIDEO_PLACE, videos=[damaged(VIDEOS[form], rng)]))
        for _ in range(60)
    }
    assert results == {"refused", "taken"}

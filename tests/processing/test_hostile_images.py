"""Files made to cost more than their bytes are refused at the door; what honest encoders write is taken."""

import io
import subprocess
import sys
import time

import hostile_images as hostile
import numpy as np
import pytest
from PIL import Image, ImageCms
from test_images import encoded, load, picture

from mmengine.errors import InvalidMedia
from mmengine.processing.media import images

SIZE = 2 * 2**20
SENTENCES = {
    "tiff_pages": "is a TIFF of several pages",
    "tiff_tags_share_data": "has a directory of 4009 tags, more than 1024",
    "tiff_fractions": "4096 fractions in its tags",
    "tiff_strips": "strips or tiles, more than 32768",
    "tiff_exif_fractions": "4096 fractions in its tags",
    "tiff_shared_tags": "has tags that claim more bytes than the file holds",
    "tiff_shared_strips": "has strips that claim more bytes than the file holds",
    "tiff_directories": "has more than 8 directories of tags",
    "gif_frames": "is an animation; pass it as a video",
    "gif_comments": "65536 beside pixels",
    "gif_extension_blocks": "65536 beside pixels",
    "gif_tail_blocks": "more than 524288 blocks",
    "png_chunks": "more than 65536 chunks",
    "png_small_data": "more than 65536 chunks",
    "png_texts": "more than 16 packed texts and profiles",
    "png_profiles": "more than 16 packed texts and profiles",
    "png_exif": "more than 1048576 bytes of EXIF",
    "jpeg_comments": "more than 1024 segments",
    "jpeg_padding": "more than 65536 bytes between its segments",
    "jpeg_junk": "more than 65536 bytes between its segments",
    "jpeg_exif": "more than 1024 segments",
    "jpeg_tables": "131072 bytes of tables",
    "jpeg_photoshop": "bytes of Photoshop's",
    "jpeg_scans": "a progressive JPEG of 65 scans or more",
    "webp_exif": "more than 1048576 bytes of EXIF",
    "webp_chunks": "more than 1024 chunks",
    "webp_frames": "is an animation; pass it as a video",
    "webp_canvas": "of 16384 x 16384 has more than 67108864 pixels",
    "bmp_runs": "a run-length coded BMP",
    "bmp_lines": "a run-length coded BMP",
}


@pytest.mark.parametrize("name", hostile.HOSTILE)
def test_refused_at_the_door(name, monkeypatch):
    data = hostile.HOSTILE[name](SIZE)
    monkeypatch.setattr(Image, "open", None)
    start = time.process_time()
    with pytest.raises(InvalidMedia) as caught:
        load(data)
    assert time.process_time() - start < 0.5
    message = str(caught.value)
    assert SENTENCES[name] in message
    assert message.startswith("image 0 ") and "\n" not in message and len(message) < 200


def test_a_page_that_follows_itself_is_one():
    assert load(hostile.grey_tiff(following=8)).size == (16, 16)


@pytest.mark.parametrize("form", ["GIF", "TIFF"])
def test_frames_are_never_counted(form, monkeypatch):
    plugin = {"GIF": images.GifImagePlugin.GifImageFile, "TIFF": images.TiffImagePlugin.TiffImageFile}[form]
    monkeypatch.setattr(plugin, "n_frames", property(lambda self: pytest.fail("counted")))
    assert load(encoded(picture(20, 20), form)).size == (20, 20)


OTHER_PLUGINS = """
import io, sys
from mmengine.processing.media.images import Image, load_rgb
from mmengine.processing.media.sources import Access
for form in ("TIFF", "WEBP"):
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, form)
    load_rgb(file.getvalue(), Access(), "image 0")
try:
    load_rgb(b"8BPS" * 10, Access(), "image 0")
except ValueError as error:
    print(error)
names = ("PsdImagePlugin", "EpsImagePlugin", "FliImagePlugin")
print([name for name in names if "PIL." + name in sys.modules])
"""


def test_plugins_of_other_formats_stay_away():
    done = subprocess.run([sys.executable, "-c", OTHER_PLUGINS], capture_output=True, text=True, check=True)
    refused, found = done.stdout.splitlines()
    assert "is no image that can be read" in refused
    assert found == "[]"


def test_honest_metadata_are_taken():
    image = picture(120, 90)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = image.getexif()
    exif[0x010F], exif[0x829A] = "a camera", 0.5
    exif.get_ifd(0x8769)[0x9286] = "a note" * 100
    rich = {"exif": exif, "icc_profile": profile}
    for form, options in {
        "JPEG": {"comment": b"c" * 60_000, "xmp": b"<x/>" * 9000, "progressive": True},
        "PNG": {},
        "WEBP": {"xmp": b"<x/>" * 9000},
        "TIFF": {"compression": "tiff_lzw", "tiffinfo": {270: "a title" * 1000}},
    }.items():
        lossless = {"lossless": True} if form == "WEBP" else {}
        data = encoded(image, form, **rich, **options, **lossless)
        plain = encoded(image, form, **lossless, **({"progressive": True} if form == "JPEG" else {}))
        assert (np.asarray(load(data)) == np.asarray(load(plain))).all(), form


def test_more_views_of_a_photo_are_no_animation():
    file = io.BytesIO()
    picture(40, 30).save(file, "MPO", save_all=True, append_images=[picture(40, 30, 1)])
    assert load(file.getvalue()).size == (40, 30)


def test_scans_behind_the_picture_are_not_its_own():
    """Phones put a video or further pictures behind a photo."""
    data = encoded(picture(64, 64), "JPEG", progressive=True)
    assert load(data + data * 200).size == (64, 64)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "I"])
def test_pictures_are_converted_in_bands(mode, monkeypatch):
    image = picture(37, 53, mode="RGBA")
    if mode.startswith("I"):
        values = np.random.default_rng(3).integers(0, 65536, (53, 37))
        image = Image.fromarray(values.astype(np.int32 if mode == "I" else np.uint16))
    else:
        image = image.convert(mode)
    whole = np.asarray(load(image))
    monkeypatch.setattr(images, "_BAND_PIXELS", 100)
    assert (np.asarray(load(image)) == whole).all()

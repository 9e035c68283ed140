"""Tests small files that are expensive to decode: a decoder process decodes or refuses each file within its
limits.
"""

import io
import subprocess
import sys

import av
import hostile_images
import hostile_videos
import numpy as np
import pytest
from PIL import Image, ImageCms
from test_images import encoded, load, picture

from mmengine.errors import InvalidMedia
from mmengine.models.media_decoding import EncodedMedia
from mmengine.processing.media import images, video_file
from mmengine.processing.media.sources import Access
from mmengine.processing.media.video_file import VideoFile
from mmengine.processing.workers.decoders import Decoders

SIZE = 2**18  # Bytes per hostile file.
LIMIT_S = 1.0
REFUSED = {  # Files that are refused before a library opens them.
    "webp_canvas": "of 16384 x 16384 has more than 67108864 pixels",
    "bmp_lines": "a run-length coded BMP of 8000 x 8000 pixels, more than 4194304",
}
REFUSED_WHILE_READ = {
    "mkv_blocks": "more than 1024 keyframes",
    "gif_canvas": "more than 67108864 pixels would have to be",
}


@pytest.fixture(scope="module")
def decoders(processor):
    decoders = Decoders(processor.decoder_recipe, 1, 2**29, LIMIT_S)
    yield decoders
    decoders.close()


@pytest.mark.parametrize("name", [*hostile_images.HOSTILE, *hostile_videos.HOSTILE])
def test_a_hostile_file_costs_its_process_no_more_than_the_limits(decoders, name):
    """The file is decoded or refused in time. The next image is decoded even if the process died."""
    is_image = name in hostile_images.HOSTILE
    make = (hostile_images.HOSTILE if is_image else hostile_videos.HOSTILE)[name]
    media = EncodedMedia("image" if is_image else "video", make(SIZE), {}, "media 0")
    good = EncodedMedia("image", encoded(picture(64, 64), "PNG"), {}, "image 1")
    decoders(good)  # Starts a process.
    try:
        decoders(media)
    except InvalidMedia as error:
        message = str(error)
        assert message.startswith("media 0") and "\n" not in message and len(message) < 250
    assert len(decoders(good).patches)


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_are_checked_before_a_library_opens_the_file(name, monkeypatch):
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(InvalidMedia, match=REFUSED[name]):
        load(hostile_images.HOSTILE[name](SIZE))


@pytest.mark.parametrize("name", REFUSED_WHILE_READ)
def test_a_video_is_refused_while_it_is_read(name, monkeypatch):
    monkeypatch.setattr(video_file, "MAX_GIF_PIXELS", 2**26)
    with pytest.raises(InvalidMedia, match=REFUSED_WHILE_READ[name]):
        video = opened(hostile_videos.HOSTILE[name](SIZE))
        list(video.frames([0, video.num_frames - 1]))


def opened(data):
    return VideoFile(data, Access(), "video 0")


def test_a_page_that_follows_itself_is_one():
    # The TIFF's directory names itself as the next directory.
    assert load(hostile_images.grey_tiff(following=8)).size == (16, 16)


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


def test_plugins_for_other_formats_are_not_loaded():
    done = subprocess.run([sys.executable, "-c", OTHER_PLUGINS], capture_output=True, text=True, check=True)
    refused, found = done.stdout.splitlines()
    assert "is not a supported image" in refused
    assert found == "[]"


def test_honest_metadata_are_taken():
    # Large but valid metadata do not change the pixels.
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
    """Phones append a video or further pictures to a photo. The decoder ignores them."""
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


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("mp4", {}),
        ("mp4", {"moov_size": "20000"}),
        ("mp4", {"movflags": "frag_keyframe+empty_moov"}),
        ("mp4", {"movflags": "dash+delay_moov"}),
        ("mov", {}),
        ("matroska", {}),
        ("matroska", {"live": "1"}),
        ("webm", {"dash": "1"}),
        ("avi", {}),
        ("mpegts", {}),
        ("mpeg", {}),
    ],
)
def test_files_of_common_tools_are_accepted(form, options):
    codec = {"webm": "vp8", "mpegts": "mpeg2video", "mpeg": "mpeg1video"}.get(form, "mpeg4")
    data = hostile_videos.record(form, codec, count=30, size=(64, 48), **options)
    with av.open(io.BytesIO(data)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    video = opened(data)
    assert video.num_frames == len(expected) == 30
    for index, frame in zip([0, 13, 29], video.frames([0, 13, 29]), strict=True):
        assert (frame == expected[index]).all()
    video.close()


def test_titles_of_a_common_size_are_taken():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4", options={"movflags": "use_metadata_tags"}) as container:
        container.metadata.update({f"name {i}": "a title" for i in range(100)})
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert opened(buffer.getvalue()).num_frames == 1

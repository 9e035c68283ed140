"""Tests video files, lists of frames, sampling options, and invalid videos."""

import base64
import io
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from mmengine.errors import InvalidMedia, InvalidRequest
from mmengine.processing.media import video_file
from mmengine.processing.media.options import video_options
from mmengine.processing.media.sources import Access
from mmengine.processing.media.video_file import VideoFile

PLACE = "<|vision_start|><|video_pad|><|vision_end|>"
NUM_FRAMES = 40


def record(
    form="mp4", codec="mpeg4", pixels="yuv420p", count=NUM_FRAMES, rate=10, size=(64, 48), gop=8, **tags
):
    width, height = size
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        container.metadata.update(tags)
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.codec_context.gop_size = gop
        for i in range(count):
            frame = np.full((height, width, 3), i * 255 // max(count - 1, 1), np.uint8)
            frame[:, : i * width // max(count, 1)] = (255, 0, 0)
            frame[: height // 4, : width // 2] = (0, 0, 255)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


@pytest.fixture(scope="module")
def clip():
    return record()


def decoded(data):
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize(
    ("form", "codec", "pixels"),
    [
        ("mp4", "mpeg4", "yuv420p"),
        ("matroska", "mpeg4", "yuv420p"),
        ("webm", "vp8", "yuv420p"),
        ("avi", "mpeg4", "yuv420p"),
        ("mpegts", "mpeg2video", "yuv420p"),
        ("gif", "gif", "rgb8"),
        ("mp4", "h264", "yuv420p"),
    ],
)
def test_any_frames_of_any_container(form, codec, pixels):
    """Seeking between keyframes gives the same frames as decoding from the start."""
    try:
        data = record(form, codec, pixels)
    except av.FFmpegError:
        pytest.skip(f"this FFmpeg has no encoder for {codec}")
    expected = decoded(data)
    video = VideoFile(data, Access(), "video 0")
    assert (video.num_frames, video.fps, video.size) == (NUM_FRAMES, 10.0, (48, 64))
    for indices in ([0, 13, 26, 39], [39], [5, 35], [0, 0, 7, 7], list(range(NUM_FRAMES))):
        for index, frame in zip(indices, video.frames(indices), strict=True):
            assert (frame == expected[index]).all(), (indices, index)
    video.close()


@pytest.mark.parametrize("form", ["mp4", "matroska", "avi"])
def test_a_title_that_is_no_text_does_not_matter(form):
    data = record(form, count=4, title="TITLETITLE")
    spoiled = data.replace(b"TITLETITLE", b"\xff\xfe\xffTITLE\xc3\x28")
    assert spoiled != data
    assert VideoFile(spoiled, Access(), "video 0").num_frames == 4


def test_few_frames_are_decoded_of_a_long_file():
    video = VideoFile(record(count=400), Access(), "video 0")
    before = video._decoded
    assert len(list(video.frames([0, 399]))) == 2
    assert video._decoded - before < 30
    video.close()


# Display matrices (a, b, c, d) with x' = a x + c y, y' = b x + d y.
SHOWN = {
    (1, 0, 0, 1): lambda image: image,
    (-1, 0, 0, 1): np.fliplr,
    (1, 0, 0, -1): np.flipud,
    (-1, 0, 0, -1): lambda image: np.rot90(image, 2),
    (0, 1, -1, 0): lambda image: np.rot90(image, -1),
    (0, -1, 1, 0): lambda image: np.rot90(image, 1),
    (0, 1, 1, 0): lambda image: image.swapaxes(0, 1),
    (0, -1, -1, 0): lambda image: np.rot90(image.swapaxes(0, 1), 2),
}


@pytest.mark.parametrize("matrix", SHOWN)
def test_phone_videos_are_shown_as_their_matrix_says(clip, matrix):
    """The matrix in the MP4's track header may rotate and mirror the frames."""
    turned = bytearray(clip)
    a, b, c, d = (value << 16 for value in matrix)
    start = clip.index(b"tkhd") + 44  # The matrix: nine fixed-point numbers (16.16 and 2.30).
    turned[start : start + 20] = struct.pack(">iiiii", a, b, 0, c, d)
    video = VideoFile(bytes(turned), Access(), "video 0")
    expected = SHOWN[matrix](decoded(clip)[20])
    assert video.size == expected.shape[:2]
    (frame,) = video.frames([20])
    assert (frame == expected).all()
    video.close()


@pytest.mark.parametrize("form", ["webm", "matroska"])
def test_the_rate_of_a_recording_with_varying_intervals_is_its_mean(form):
    """WebM recordings from browsers contain frame times in milliseconds, but no frame rate."""
    times = np.cumsum([0, *(40 + 137 * (i % 5) for i in range(NUM_FRAMES - 1))])
    video = VideoFile(record_at(times, form), Access(), "video 0")
    assert video.num_frames == NUM_FRAMES
    assert video.num_frames / video.fps == pytest.approx(times[-1] / 1000, rel=0.05)
    video.close()


@pytest.mark.parametrize(
    "times",
    [
        [0, 40],
        [0, 86_400_000],  # A picture a day.
        [0, 500, 1000],
        [5000, 5300, 5700, 6000],
        [*range(0, 1000, 40), *range(61_000, 62_000, 40)],  # A pause.
    ],
)
def test_the_rate_of_few_frames_is_that_of_their_times(times):
    video = VideoFile(record_at(times, "webm"), Access(), "video 0")
    assert (video.num_frames - 1) / video.fps == pytest.approx((times[-1] - times[0]) / 1000, rel=0.05)
    video.close()


def record_at(times, form):
    """Return a file without a frame rate. `times`: the frames' times in ms."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream("vp8", rate=1000)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = int(time), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def test_containers_without_times_are_counted(clip):
    """If a container stores no frame times, frames are found by counting from the first frame."""
    video = VideoFile(clip, Access(), "video 0")
    video._times = None
    expected = decoded(clip)
    for index, frame in zip([0, 20, 39], video.frames([0, 20, 39]), strict=True):
        assert (frame == expected[index]).all()
    video.close()


def test_a_file_equals_its_frames(processor, clip, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(clip)
    url = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    frames = np.stack(decoded(clip))
    results = [
        processor.prepare_text(PLACE, videos=[frames], media_options={"video_metadata": [{"fps": 10.0}]}),
        processor.prepare_text(PLACE, videos=[clip]),
        processor.prepare_text(PLACE, videos=[tmp_path / "clip.mp4"]),
        *(
            processor.prepare([{"role": "user", "content": [part]}], base_folder=tmp_path)
            for part in (
                {"type": "video", "video": str(tmp_path / "clip.mp4")},
                {"type": "video", "video": f"file://{tmp_path}/clip.mp4"},
                {"type": "video", "video": "clip.mp4", "fps": 2.0},
                {"type": "video", "path": "clip.mp4"},
                {"type": "video_url", "video_url": {"url": url}},
            )
        ),
    ]
    first = results[0].media[0].item
    assert first.grid[0] == 4  # Four patches with two frames each: the checkpoint takes at most 8 frames.
    for result in results:
        item = result.media[0].item
        assert (item.mm_hash, item.grid) == (first.mm_hash, first.grid)
        assert "<0.3 seconds>" in processor.tokenizer.decode(result.prompt_token_ids.tolist())


def test_frames_in_every_form(processor, tmp_path):
    frames = [np.full((40, 56, 3), 30 * i, np.uint8) for i in range(5)]
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"{i}.png")
    paths = [str(tmp_path / f"{i}.png") for i in range(5)]
    lists = [frames, [Image.fromarray(f) for f in frames], paths, [f"file://{path}" for path in paths]]
    lists.append([Path(path).read_bytes() for path in paths])
    results = [
        processor.prepare([{"role": "user", "content": [{"type": "video", "video": items}]}])
        for items in lists
    ]
    results.append(processor.prepare_text(PLACE, videos=[np.stack(frames)]))
    results.append(processor.prepare_text(PLACE, videos=[lists[1]]))
    assert len({result.media[0].item.mm_hash for result in results}) == 1
    part = {"type": "video", "video": frames, "sample_fps": 2.0}
    kept = processor.prepare([{"role": "user", "content": [part]}])
    # A temporal patch has two frames, so the processor repeats the fifth frame.
    assert kept.media[0].item.grid[0] == 3
    text = processor.tokenizer.decode(kept.prompt_token_ids.tolist())
    assert "<0.2 seconds>" in text and "<1.2 seconds>" in text and "<2.0 seconds>" in text


def test_one_frame_is_shown_twice(processor):
    result = processor.prepare_text(PLACE, videos=[np.zeros((1, 64, 64, 3), np.uint8)])
    assert result.media[0].item.grid[0] == 1
    assert processor.tokenizer.decode(result.prompt_token_ids.tolist()) == "<0.0 seconds>"


def indices(processor, total, rate, **options):
    chosen = video_options(options, "video 0")
    return processor.media.settings.sample(total, rate, chosen, "video 0").tolist()


def test_sampling(processor):
    assert indices(processor, 100, 10.0) == [0, 14, 28, 42, 57, 71, 85, 99]
    assert (
        indices(processor, 100, 10.0, max_frames=768) == np.linspace(0, 99, 20).round().astype(int).tolist()
    )
    assert (
        indices(processor, 100, 10.0, fps=0.5)
        == indices(processor, 100, 10.0, nframes=5)
        == [0, 25, 50, 74, 99]
    )
    assert indices(processor, 100, 10.0, fps=0.1, min_frames=2) == [0, 99]
    assert indices(processor, 3, 10.0) == [0, 1, 2]
    assert indices(processor, 100, 10.0, num_frames=3) == [0, 50, 99]
    assert indices(processor, 100, 10.0, video_start=2.0, video_end=4.0, num_frames=3) == [20, 30, 40]
    assert indices(processor, 100, 10.0, video_start=9.5, fps=1) == [95, 96, 98, 99]
    with pytest.raises(InvalidMedia, match="the video has 10.00 seconds"):
        indices(processor, 100, 10.0, video_start=5.0, video_end=4.0)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        indices(processor, 100, 10.0, fps=2, nframes=4)


def test_pixel_options_count_a_frame(processor):
    frames = np.zeros((4, 300, 400, 3), np.uint8)
    for options, most in (({"max_pixels": 64 * 64}, 4096), ({"total_pixels": 4 * 96 * 96}, 9216)):
        result = processor.prepare_text(PLACE, videos=[frames], media_options=options)
        grid = result.media[0].item.grid
        assert most // 4 < grid[1] * grid[2] * 256 <= most
    result = processor.prepare_text(
        PLACE, videos=[frames], media_options={"resized_height": 64, "resized_width": 96}
    )
    assert result.media[0].item.grid == (2, 4, 6)


def sound_only():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    return buffer.getvalue()


def playlist(tmp_path):
    (tmp_path / "inner.mp4").write_bytes(record(count=3))
    return f"ffconcat version 1.0\nfile '{tmp_path}/inner.mp4'\n".encode()


MOVIE = record(count=30)
LONG = record("avi", count=60)
BAD = {
    "text": (b"just some text\n" * 50, "video 0 is damaged or has an unsupported format"),
    "empty": (b"", "video 0 is damaged or has an unsupported format"),
    "image": (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "video 0 is damaged or has an unsupported format"),
    "subtitles": (
        b"1\n00:00:01,000 --> 00:00:02,000\nhi\n",
        "video 0 is damaged or has an unsupported format",
    ),
    "hls": (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n",
        "is damaged or has an unsupported format",
    ),
    "playlist": (playlist, "is damaged or has an unsupported format"),
    "sound": (sound_only(), "video 0 holds no video"),
    "no frames": (record("avi", count=0), "video 0"),
    "cut short": (LONG[: len(LONG) * 4 // 5], "video 0 is cut short: "),
    "header": (MOVIE[:100], "video 0"),
    "zeroed": (MOVIE[:48] + b"\0" * (len(MOVIE) - 1500) + MOVIE[-1452:], "video 0"),
    "url": ("https://example.com/a.mp4", "video 0 is a URL"),
    "missing": ("nowhere.mp4", "video 0: there is no file 'nowhere.mp4'"),
    "no list": ([], "video 0 has 0 frames"),
    "bad frame": ([b"abc", b"abc"], "video 0, frame 0 is not a supported image"),
    "sizes": (
        [np.zeros((32, 32, 3), np.uint8)] * 2 + [np.zeros((32, 33, 3), np.uint8)] * 2,
        "frame 2 is 33 x 32",
    ),
    "shape": (np.zeros((2, 2, 2, 2, 2), np.uint8), "video 0 has the shape"),
    "object": (object(), "video 0 has the type object"),
    "thin": (np.zeros((4, 2, 1000, 3), np.uint8), "video 0 is 1000 x 2 pixels; the longer"),
    "fps": ((np.zeros((4, 32, 32, 3), np.uint8), {"fps": 0}), "fps of its metadata must be a positive"),
    "indices": (
        (np.zeros((4, 32, 32, 3), np.uint8), {"frames_indices": [3, 2, 1, 0]}),
        "must be 4 ascending",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_videos_give_one_sentence(processor, name, tmp_path):
    source, expected = BAD[name]
    if callable(source):
        source = source(tmp_path)
    with pytest.raises(InvalidMedia) as caught:
        processor.prepare_text(PLACE, videos=[source])
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message and " at 0x" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("limit", "value", "expected"),
    [
        ("MAX_PACKETS", 10, "more than 10 frames"),
        ("MAX_FRAME_PIXELS", 1000, "has frames of 64 x 48 pixels, more than 1000"),
        ("MAX_DECODED_FRAMES", 10, "more than 10 frames would have to be decoded"),
        ("MAX_VIDEO_BYTES", 100, "video 0 is larger than"),
    ],
)
def test_limits(processor, monkeypatch, limit, value, expected):
    monkeypatch.setattr(video_file, limit, value)
    with pytest.raises(InvalidMedia, match=expected):
        processor.prepare_text(PLACE, videos=[MOVIE])

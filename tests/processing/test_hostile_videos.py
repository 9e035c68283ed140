"""Videos made to cost more than their bytes are refused at the door, and those of common tools are taken."""

import io
import time

import av
import hostile_videos as hostile
import numpy as np
import pytest

from mmengine.errors import InvalidMedia
from mmengine.processing.media import video_file, video_headers
from mmengine.processing.media.sources import Access
from mmengine.processing.media.video_file import VideoFile

SIZE = 2**20
SENTENCES = {
    "mp4_samples": "claims 100000000 frames and samples or more",
    "mp4_edits": "edits of up to",
    "mp4_keys": "has more than 1024 titles",
    "mp4_packed_header": "holds a packed header",
    "mp4_tracks": "has more than 64 tracks",
    "mp4_fragments": "has fragments out of order",
    "mp4_boxes": "has more than 131072 boxes",
    "mkv_tags": "has tags of more than 65536 bytes",
    "mkv_cues": "or out of order",
    "mkv_chapters": "has chapters of more than 65536 bytes",
    "mkv_voids": "has more than 65536 elements",
    "avi_titles": "has titles of more than 65536 bytes",
    "avi_streams": "chunks or 64 streams",
}
BEHIND = {"mkv_blocks": "or 1024 out of order", "gif_canvas": "more than 67108864 pixels would have to be"}


def opened(data):
    return VideoFile(data, Access(), "video 0")


@pytest.mark.parametrize("name", SENTENCES)
def test_refused_at_the_door(name, monkeypatch):
    data = hostile.HOSTILE[name](2 * SIZE if name == "mp4_boxes" else SIZE)
    monkeypatch.setattr(av, "open", None)
    monkeypatch.setattr(video_headers, "MAX_ELEMENTS", 2**16)
    start = time.process_time()
    with pytest.raises(InvalidMedia) as caught:
        opened(data)
    assert time.process_time() - start < 1.0
    message = str(caught.value)
    assert SENTENCES[name] in message
    assert message.startswith("video 0 ") and "\n" not in message and len(message) < 200


@pytest.mark.parametrize("name", BEHIND)
def test_refused_while_it_is_read(name, monkeypatch):
    monkeypatch.setattr(video_file, "MAX_GIF_PIXELS", 2**26)
    start = time.process_time()
    with pytest.raises(InvalidMedia, match=BEHIND[name]):
        video = opened(hostile.HOSTILE[name](SIZE))
        list(video.frames([0, video.num_frames - 1]))
    assert time.process_time() - start < 2.0


def test_all_of_them_are_tried():
    assert hostile.HOSTILE.keys() == SENTENCES.keys() | BEHIND.keys()


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
def test_what_common_tools_write_is_taken(form, options):
    codec = {"webm": "vp8", "mpegts": "mpeg2video", "mpeg": "mpeg1video"}.get(form, "mpeg4")
    data = hostile.record(form, codec, count=30, size=(64, 48), **options)
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

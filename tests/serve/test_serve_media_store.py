"""Tests that the media store restores a request's patches, is bounded, and deletes the files when no request
needs them.
"""

import base64
import errno
import io
import os
import random
import stat

import numpy as np
import pytest
from PIL import Image

from mmengine.errors import InvalidMedia, QueueFull
from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.media_store import HEADER, MediaStore


@pytest.fixture(scope="module")
def processor():
    folder = resolve_folder(None)
    return plugin_for(folder).load_processor(folder)


def png(seed, size=(70, 50)):
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_clip(path):
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = 64, 48
        for number in range(12):
            pixels = np.full((48, 64, 3), 20 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def prepared(processor, *parts, **fields):
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return Prompt(messages=[{"role": "user", "content": content}], **fields).prepare(processor).media


def all_kinds(processor, tmp_path):
    """Return media from every kind of source."""
    (tmp_path / "a.png").write_bytes(png(1))
    write_clip(tmp_path / "clip.mp4")
    url = "data:image/png;base64," + base64.b64encode(png(2)).decode()
    frames = [Image.open(io.BytesIO(png(seed))) for seed in (5, 6, 7)]
    return prepared(
        processor,
        {"type": "image", "image": "a.png", "max_pixels": 32 * 32 * 3},
        {"type": "image", "image": url},
        {"type": "image", "image": Image.open(io.BytesIO(png(3)))},
        {"type": "image", "image": np.full((40, 40, 3), 7, np.uint8)},
        {"type": "video", "video": "clip.mp4", "fps": 4},
        {"type": "video", "video": frames},
        base_folder=tmp_path,
    )


def test_all_kinds_of_media_come_back(processor, tmp_path):
    media = all_kinds(processor, tmp_path)
    assert [one.source is None for one in media] == [False, False, True, True, False, True]
    MediaStore(tmp_path / "media", 10**8).hold("a", media)
    for name in ("a.png", "clip.mp4"):
        (tmp_path / name).unlink()
    store = MediaStore(tmp_path / "media", 10**8)
    store.hold_stored("a", [one.item for one in media])
    store.sweep()
    for one in media:
        again = store.load(one.item, processor)
        assert again.item == one.item and np.array_equal(again.patches, one.patches)
    files = list((tmp_path / "media").iterdir())
    assert len(files) == 6 and store.num_bytes == sum(path.stat().st_size for path in files)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert stat.S_IMODE((tmp_path / "media").stat().st_mode) == 0o700


def test_files_go_with_the_last_request_that_needs_them(processor, tmp_path):
    store = MediaStore(tmp_path, 10**8)
    shared, own = (prepared(processor, {"type": "image", "image": png(seed)}) for seed in (1, 2))
    store.hold("a", (*shared, *own))
    store.hold("b", (*shared, *shared))
    assert len(list(tmp_path.iterdir())) == 2
    store.release("a")
    assert [path.stem for path in tmp_path.iterdir()] == [shared[0].item.mm_hash.hex()]
    store.release("a")
    store.release("b")
    assert not list(tmp_path.iterdir()) and store.num_bytes == 0


def test_files_of_an_earlier_process_are_removed(processor, tmp_path):
    MediaStore(tmp_path, 10**8).hold("a", prepared(processor, {"type": "image", "image": png(1)}))
    (tmp_path / "ff.media.tmp").write_bytes(b"half")
    (tmp_path / "note.txt").write_bytes(b"somebody's own")
    store = MediaStore(tmp_path, 10**8)
    store.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"] and store.num_bytes == 0


def test_it_is_bounded(processor, tmp_path):
    media = [prepared(processor, {"type": "image", "image": png(seed)}) for seed in range(3)]
    store = MediaStore(tmp_path, 2 * len(png(0)) + 200)
    store.hold("a", media[0])
    store.hold("b", media[1])
    with pytest.raises(QueueFull, match="media_store_bytes"):
        store.hold("c", (*media[0], *media[2]))
    assert len(list(tmp_path.iterdir())) == 2
    store.release("b")
    store.hold("c", (*media[0], *media[2]))
    store.release("a")
    assert len(list(tmp_path.iterdir())) == 2


def test_damage_is_named(processor, tmp_path):
    (media,) = prepared(processor, {"type": "image", "image": png(1)})
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    (raw,) = prepared(processor, {"type": "image", "image": pixels})
    store = MediaStore(tmp_path, 10**8)
    store.hold("a", (media, raw))
    rng = random.Random(0)
    for one in (media, raw):
        path = tmp_path / f"{one.item.mm_hash.hex()}.media"
        data = path.read_bytes()
        places = [*range(HEADER.size), *(rng.randrange(len(data)) for _ in range(40))]
        for place in places:
            if 12 <= place < 16:
                continue  # reserved
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            with pytest.raises(InvalidMedia, match="damaged"):
                store.load(one.item, processor)
            path.write_bytes(data[:place])
            with pytest.raises(InvalidMedia, match="damaged"):
                store.load(one.item, processor)
        path.unlink()
        with pytest.raises(InvalidMedia, match="not in the media store"):
            store.load(one.item, processor)


def test_other_pixels_are_not_taken_for_the_same(processor, tmp_path):
    one, other = (prepared(processor, {"type": "image", "image": png(seed)})[0] for seed in (1, 2))
    store = MediaStore(tmp_path, 10**8)
    store.hold("a", (one, other))
    names = [tmp_path / f"{media.item.mm_hash.hex()}.media" for media in (one, other)]
    names[1].replace(names[0])
    with pytest.raises(InvalidMedia, match="other pixels"):
        store.load(one.item, processor)


def test_a_full_disk_is_a_full_queue(processor, tmp_path, monkeypatch):
    # A full disk raises QueueFull, so the client may retry, and leaves no file.
    media = prepared(processor, {"type": "image", "image": png(1)})
    store, replace = MediaStore(tmp_path, 10**8), os.replace

    def full(*names):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(QueueFull, match="No space left"):
        store.hold("a", media)
    assert not list(tmp_path.iterdir()) and store.num_bytes == 0
    monkeypatch.setattr(os, "replace", replace)
    store.hold("a", media)
    assert len(list(tmp_path.iterdir())) == 1

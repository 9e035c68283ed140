"""Tests the cache for prepared media: hits, distinct keys, limits, concurrent callers and failures."""

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from mmengine.errors import InvalidMedia, InvalidRequest
from mmengine.models.media_cache import MediaCache
from mmengine_qwen3_vl.processing import load_processor


def encoded(seed=0, side=128):
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def ask(processor, *images, **options):
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return processor.prepare([{"role": "user", "content": content}], **options)


@pytest.fixture
def processor(folder):
    return load_processor(folder)


def counts(processor):
    return processor.media_cache.hits, processor.media_cache.misses


def test_the_same_bytes_are_prepared_once_however_they_come(processor, tmp_path):
    data = encoded()
    (tmp_path / "one.png").write_bytes(data)
    first = ask(processor, data)
    for image in (data, bytearray(data), str(tmp_path / "one.png"), tmp_path / "one.png"):
        again = ask(processor, image)
        assert again.media[0].item == first.media[0].item
        assert again.media[0].patches is first.media[0].patches
        assert again.media[0].source.data == data
        assert np.array_equal(again.prompt_token_ids, first.prompt_token_ids)
    assert counts(processor) == (4, 1)
    processor.media_cache.max_bytes = 0
    cold = ask(processor, data).media[0]
    assert cold.patches is not first.media[0].patches
    assert np.array_equal(cold.patches, first.media[0].patches)
    assert cold.item == first.media[0].item


def test_other_bytes_options_and_tenants_are_told_apart(processor):
    first = ask(processor, encoded())
    small = ask(processor, encoded(), media_options={"max_pixels": 64 * 64, "min_pixels": 1})
    assert small.media[0].item.grid != first.media[0].item.grid
    assert ask(processor, encoded(1)).media[0].item.mm_hash != first.media[0].item.mm_hash
    for salt in ("a", "b", '"', "\n"):
        assert ask(processor, encoded(), cache_salt=salt).media[0].item == first.media[0].item
    assert counts(processor) == (0, 7)
    ask(processor, encoded(), cache_salt="b")
    assert counts(processor) == (1, 7)


def test_pixels_from_elsewhere_are_not_kept(processor):
    image = Image.open(io.BytesIO(encoded()))
    ask(processor, image), ask(processor, np.asarray(image))
    assert counts(processor) == (0, 0)
    assert len(processor.media_cache) == 0


def test_each_error_names_the_item_of_its_own_request(processor):
    broken = encoded()[:200]
    for place in range(3):
        with pytest.raises(InvalidMedia, match=f"image {place} .*damaged"):
            ask(processor, *[encoded(side=64)] * place, broken)
    with pytest.raises(InvalidRequest, match="min_pixels 4 is larger than max_pixels 2"):
        ask(processor, encoded(), media_options={"max_pixels": 2, "min_pixels": 4})
    assert len(processor.media_cache) == 1


def test_a_file_that_changes_while_it_is_read_is_not_kept(processor, tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(path, "w") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 64
        for n in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 60 * n, np.uint8))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    message = [{"role": "user", "content": [{"type": "video", "video": str(path)}]}]
    first = processor.prepare(message).media[0]
    assert processor.prepare(message).media[0].patches is first.patches
    assert len(processor.media_cache) == 1
    processor.media_cache.max_bytes, kept = 0, processor.media_cache.max_bytes  # Clears the cache.
    processor.media_cache.max_bytes = kept
    load = processor._loader._load

    def load_and_touch(*args):
        os.utime(path, ns=(1, 1))
        return load(*args)

    monkeypatch.setattr(processor._loader, "_load", load_and_touch)
    assert processor.prepare(message).media[0].item == first.item
    assert len(processor.media_cache) == 0


def test_the_longest_unused_goes_and_the_bound_holds():
    cache = MediaCache(max_bytes=30)
    get = lambda key, size: cache.get(key, lambda: (key, size), lambda value: value[1])  # noqa: E731
    for key in (b"a", b"b", b"c"):
        get(key, 10)
    get(b"a", 10)  # Now b is the least recently used.
    get(b"d", 10)
    assert [key in cache._values for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    get(b"e", 31)  # A value larger than the cache is returned and not stored.
    assert cache.num_bytes == 30
    get(b"f", 25)
    assert list(cache._values) == [b"f"]
    cache.max_bytes = 5
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_concurrent_callers_share_a_value_and_a_failure_is_retried():
    cache, made, gate = MediaCache(), [], threading.Event()

    def make():
        made.append(1)
        gate.wait(10)
        if len(made) == 1:
            raise InvalidMedia("the first attempt")
        return b"value"

    def get():
        try:
            return cache.get(b"key", make, len)
        except InvalidMedia as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(get) for _ in range(8)]
        gate.set()
        answers = [future.result(10) for future in futures]
    assert sorted(map(str, answers)) == sorted(["the first attempt", *[str(b"value")] * 7])
    assert len(made) == 2
    assert (cache.hits, cache.misses) == (6, 2)

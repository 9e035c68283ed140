"""Tests that a media item encoded in parts has the same features as the item encoded at once. With the CPU
kernels, the bits are equal.
"""

import numpy as np
import pytest
import torch

from mmengine.encoder_cache.work import work_of
from mmengine.models.progress import steps_reported_to
from mmengine.models.vision import tower as vision
from mmengine.models.vision import tower_cost as measured
from mmengine.models.vision import tower_pass as parts
from mmengine.native.library import describe
from mmengine_qwen3_vl import plugin
from tests.qwen3_vl.qwen3_vl_reference import make_reference

GRIDS = [(1, 12, 18), (3, 6, 10), (1, 2, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower")
    make_reference(folder, seed=2)
    return folder


def load(folder, dtype, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(vision, "vision_kernels", lambda *of: None)
    model = plugin.load_model(folder, device="cpu", dtype=dtype)
    if kernels and not model._vision.has_kernels:
        pytest.skip(describe())
    return model


def pixels_of(grid, seed=0):
    shape = (int(np.prod(grid)), 96)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def in_parts(model, grid, piece, even=64):
    """Encode an item in parts that each take `piece` units of work. Returns the features, and the number of
    parts before the last part.
    """
    work, done, left = work_of(grid, even), 0, 0
    encoding = model.encode_in_parts(pixels_of(grid), grid, even)
    while True:
        done = min(work, done + piece)
        features = encoding.advance(done, work)
        if features is not None:
            assert done == work
            return features, left
        left += 1


@pytest.mark.parametrize(
    "dtype, kernels", [("float32", True), ("bfloat16", True), ("float32", False)], ids=str
)
def test_parts_equal_the_whole(folder, dtype, kernels, monkeypatch):
    monkeypatch.setattr(parts, "TILE", 100)
    model = load(folder, dtype, kernels, monkeypatch)
    with torch.inference_mode():
        for grid in GRIDS:
            whole = model.encode(pixels_of(grid), [grid])
            for piece in (150, 10**9):
                features, left = in_parts(model, grid, piece)
                assert left == -(-work_of(grid, 64) // piece) - 1
                if kernels:
                    assert torch.equal(features, whole)
                else:
                    assert (features - whole).abs().max() < 1e-4


def test_each_part_computes_its_share(folder, monkeypatch):
    """Each part stops before the stage that would exceed its share of the work, and reports progress."""
    monkeypatch.setattr(parts, "TILE", 64)
    model, grid = load(folder, "float32", True, monkeypatch), (1, 24, 24)
    told = []
    encoding, work = model.encode_in_parts(pixels_of(grid), grid, 64), work_of(grid, 64)
    with torch.inference_mode(), steps_reported_to(lambda: told.append(None)):
        for done in range(work // 10, work, work // 10):
            before = len(told)
            assert encoding.advance(done, work) is None and len(told) > before
            assert encoding._done * work <= done * encoding._total < (encoding._done + encoding._next) * work
        assert encoding.advance(work, work) is not None
    assert encoding._done == encoding._total


def test_patches_that_contradict_their_grid_are_refused(folder, monkeypatch):
    model = load(folder, "float32", True, monkeypatch)
    with pytest.raises(ValueError, match="grids"):
        model.encode_in_parts(pixels_of((1, 4, 4)), (1, 4, 6), 64)


def test_the_encoders_speed_is_measured(folder, monkeypatch):
    """`even_patches` is the number of patches at which attention takes as long as the other operations. If
    attention takes twice as long, this number halves.
    """
    model = load(folder, "float32", True, monkeypatch)
    times = iter([400_000, 800_000, 400_000, 1_600_000])
    monkeypatch.setattr(measured, "_fastest", lambda compute: compute() or next(times))
    one, two = model.measure_encoder(), model.measure_encoder()
    assert one.work_ns == two.work_ns > 1 and abs(one.even_patches - 2 * two.even_patches) <= 1

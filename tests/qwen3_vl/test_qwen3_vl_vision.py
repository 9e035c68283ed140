"""Tests the vision tower: normalisation, features for batches, and refusals."""

import itertools

import numpy as np
import pytest
import torch
from qwen3_vl_reference import make_reference, reference_pixels

from mmengine.gpu.vision_ops import VisionOps, attend_by_frames, rotate
from mmengine.models.vision import tower as vision
from mmengine.native.library import describe
from mmengine_qwen3_vl import plugin

GRIDS = [(1, 4, 6), (3, 2, 4), (1, 8, 2), (1, 6, 4), (2, 4, 4), (1, 2, 2)]


@pytest.fixture(scope="module", params=["kernels", "torch", "as on a GPU"])
def tower(request, tmp_path_factory):
    """Return the reference and our model. Our model has three variants: CPU kernels, only torch, and frames
    packed as on a GPU.
    """
    folder = tmp_path_factory.mktemp("tower")
    reference = make_reference(folder, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "kernels":
            patch.setattr(vision, "vision_kernels", lambda *of: None)
        if request.param == "as on a GPU":
            patch.setattr(vision, "vision_ops", lambda *of: VisionOps(rotate, attend_by_frames))
        model = plugin.load_model(folder, device="cpu", dtype="float32")
    if request.param == "kernels" and model._vision._kernels is None:
        pytest.skip(describe())
    return reference, model


def pixels_of(grid, seed=0):
    shape = (int(np.prod(grid)), 96)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def test_every_pixel_value_is_normalised_to_the_bit():
    values = np.arange(256, dtype=np.uint8)
    assert torch.equal(vision.normalise(torch.from_numpy(values)), reference_pixels(values))


def test_packed_features_equal_the_reference(tower):
    reference, model = tower
    patches = torch.cat([pixels_of(grid, seed) for seed, grid in enumerate(GRIDS)])
    with torch.inference_mode():
        ours = model.encode(patches, GRIDS)
        out = reference.model.get_image_features(
            reference_pixels(patches.numpy()), torch.tensor(GRIDS), return_dict=True
        )
    # Older transformers versions return a single tensor, newer versions a list with a tensor per image.
    features = [
        torch.cat(tuple(x)) if isinstance(x, (list, tuple)) else x
        for x in (out.pooler_output, *out.deepstack_features)
    ]
    theirs = torch.cat(features, -1)
    assert ours.shape == (sum(t * h * w for t, h, w in GRIDS) // 4, 3 * model.spec.hidden_size)
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 1, 3]])
def test_packed_equals_alone_in_any_order(tower, order):
    _, model = tower
    with torch.inference_mode():
        alone = [model.encode(pixels_of(GRIDS[i], i), [GRIDS[i]]) for i in order]
        packed = model.encode(torch.cat([pixels_of(GRIDS[i], i) for i in order]), [GRIDS[i] for i in order])
    assert (packed - torch.cat(alone)).abs().max() < 1e-4
    if model._vision._kernels is not None:
        assert torch.equal(packed, torch.cat(alone))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_depend_on_neither_the_pack_nor_the_threads(tmp_path, dtype):
    """Features are cached by content, so they must not depend on other items or the number of threads."""
    make_reference(tmp_path, seed=3)
    model = plugin.load_model(tmp_path, device="cpu", dtype=dtype)
    if model._vision._kernels is None:
        pytest.skip(describe())
    parts = [pixels_of(grid, seed) for seed, grid in enumerate(GRIDS)]
    threads = torch.get_num_threads()
    with torch.inference_mode():
        alone = torch.cat([model.encode(part, [grid]) for part, grid in zip(parts, GRIDS, strict=True)])
        for count in (1, 2):
            torch.set_num_threads(count)
            try:
                assert torch.equal(model.encode(torch.cat(parts), GRIDS), alone)
            finally:
                torch.set_num_threads(threads)


def test_items_do_not_see_each_other(tower):
    _, model = tower
    grid = (1, 4, 4)
    with torch.inference_mode():
        one = model.encode(torch.cat([pixels_of(grid, 1), pixels_of(grid, 2)]), [grid, grid])
        two = model.encode(torch.cat([pixels_of(grid, 1), pixels_of(grid, 3)]), [grid, grid])
    assert torch.equal(one[:4], two[:4])
    assert not torch.allclose(one[4:], two[4:], atol=1e-2)


def test_the_tables_of_grids_are_bounded(tower, monkeypatch):
    _, model = tower
    monkeypatch.setattr(vision, "_MAX_CACHED_PATCHES", 40)
    model._vision._tables.clear()
    with torch.inference_mode():
        first = model.encode(pixels_of((1, 4, 4)), [(1, 4, 4)])
        for h, w in itertools.product((2, 4, 6, 8), repeat=2):
            model.encode(pixels_of((1, h, w)), [(1, h, w)])
            assert sum(h * w for h, w in model._vision._tables) <= 40
        assert torch.equal(first, model.encode(pixels_of((1, 4, 4)), [(1, 4, 4)]))


@pytest.mark.parametrize(
    "patches, grids",
    [
        (torch.zeros(15, 96, dtype=torch.uint8), [(1, 4, 4)]),
        (torch.zeros(16, 95, dtype=torch.uint8), [(1, 4, 4)]),
        (torch.zeros(16, 96), [(1, 4, 4)]),
        (torch.zeros(15, 96, dtype=torch.uint8), [(1, 3, 5)]),
        (torch.zeros(16, 96, dtype=torch.uint8), [(-1, -4, 4)]),
        (torch.zeros(0, 96, dtype=torch.uint8), []),
    ],
)
def test_patches_that_contradict_their_grids_are_refused(tower, patches, grids):
    with pytest.raises(ValueError, match="grid"):
        tower[1].encode(patches, grids)

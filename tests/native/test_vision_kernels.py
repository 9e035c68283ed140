"""Tests the vision tower's kernels against torch, for each instruction set that this CPU has."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmengine.models.vision.segments import Rotation, attend_native, attend_torch
from mmengine.models.vision.tower import normalise
from mmengine.native.vision import VisionKernels, vision_kernels

DTYPES = (torch.float32, torch.bfloat16)
HEADS = ((4, 24), (2, 64), (3, 72), (1, 80), (2, 8), (1, 256))


def kernels_of(library, heads, head_dim, dtype):
    return VisionKernels(library, heads, head_dim, DTYPES.index(dtype))


def pack_of(lengths, heads, head_dim, dtype, seed=0):
    """Return random qkv and the rotation for a pack of frames. `lengths`: number of patches per frame. A
    frame's values depend only on its index and length.
    """
    parts, angles = [], []
    for n, length in enumerate(lengths):
        random = torch.Generator().manual_seed(100 * seed + n)
        parts.append(torch.randn(length, 3 * heads * head_dim, generator=random) * 1.5)
        angles.append(torch.randn(length, head_dim // 2, generator=random))
    cos, sin = torch.cat(angles).cos(), torch.cat(angles).sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), lengths)
    return torch.cat(parts).to(dtype), rotation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, head_dim", HEADS)
def test_attention_equals_torch_on_ragged_packs(library, heads, head_dim, dtype):
    kernels = kernels_of(library, heads, head_dim, dtype)
    lengths = [1, 16, 5, 33, 64, 700, 1, 97, 1100 if head_dim == 64 else 20]
    qkv, pack = pack_of(lengths, heads, head_dim, dtype)
    ours = attend_native(kernels, qkv, pack)
    exact = attend_torch(qkv.double() if dtype == torch.float32 else qkv.float(), heads, pack)
    # The limit for bfloat16 is large, because rounding alone changes a value below 4 by up to 2^-7.
    error = (ours.double() - exact.double()).abs()
    assert error.max() < (2e-5 if dtype == torch.float32 else 6e-2)
    assert error.mean() < (1e-6 if dtype == torch.float32 else 3e-3)
    assert exact.std() > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_frame_does_not_see_its_neighbours_nor_the_threads(library, dtype):
    """A frame's result does not depend on other frames, the frame's position or the number of threads."""
    kernels = kernels_of(library, 4, 24, dtype)
    lengths = [16, 600, 1, 40, 1030, 64]
    qkv, pack = pack_of(lengths, 4, 24, dtype)
    together = attend_native(kernels, qkv, pack).split(lengths)
    parts = qkv.split(lengths)
    threads = torch.get_num_threads()
    for order in ([0], [4], [5, 4, 3, 2, 1, 0], [3, 1]):
        starts = np.cumsum([0, *lengths])
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
        chosen = Rotation(pack.cos[rows], pack.sin[rows], [lengths[i] for i in order])
        torch.set_num_threads(1 + len(order) % 2)
        try:
            alone = attend_native(kernels, torch.cat([parts[i] for i in order]), chosen)
        finally:
            torch.set_num_threads(threads)
        for part, i in zip(alone.split([lengths[i] for i in order]), order, strict=True):
            assert torch.equal(part, together[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_in_its_frame_and_does_not_vanish(library, dtype):
    kernels = kernels_of(library, 2, 64, dtype)
    qkv, pack = pack_of([30, 30], 2, 64, dtype)
    for place in (0, 2 * 64, 4 * 64):  # q, k and v of the first head
        poisoned = qkv.clone()
        poisoned[3, place] = float("nan")
        out = attend_native(kernels, poisoned, pack)
        assert out[3 if place == 0 else slice(0, 30), :64].isnan().any(-1).all()
        assert not out[30:].isnan().any() and not out[:, 64:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_far_apart_do_not_overflow(library, dtype):
    kernels = kernels_of(library, 1, 64, dtype)
    qkv, pack = pack_of([600], 1, 64, dtype)
    qkv[:, :128] *= 40
    ours = attend_native(kernels, qkv, pack)
    exact = attend_torch(qkv.float(), 1, pack)
    assert (ours.float() - exact).abs().max() < (1e-3 if dtype == torch.float32 else 0.6)
    assert (ours.float() - exact).abs().mean() < (1e-5 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise_kernels(library, dtype):
    kernels = kernels_of(library, 1, 64, dtype)
    x = torch.cat((torch.linspace(-12, 12, 40_001), torch.tensor([0.0, -90, 90, float("nan"), 1e4, -1e4])))
    x = x.to(dtype)
    ours = x.clone()
    kernels.gelu(ours)
    exact = F.gelu(x.double(), approximate="tanh")
    assert torch.equal(ours.isnan(), x.isnan())
    error = (ours.double() - exact).abs() / exact.abs().clamp(min=1.0)
    assert error.nan_to_num().max() < (1e-6 if dtype == torch.float32 else 4.1e-3)
    pixels = torch.arange(256, dtype=torch.uint8).repeat(97)[:-5]
    numbers = torch.empty(len(pixels), dtype=dtype)
    kernels.normalise(pixels, numbers)
    assert torch.equal(numbers, normalise(pixels).to(dtype))


def test_shapes_and_types_without_a_kernel_are_left_to_torch():
    assert vision_kernels(2, 12, torch.float32) is None
    assert vision_kernels(2, 264, torch.float32) is None
    assert vision_kernels(2, 64, torch.float16) is None

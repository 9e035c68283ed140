"""Tests of the Triton matmul: results equal torch's, and a row has the same bits in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16]


@pytest.fixture(scope="module")
def kernels(kernel_device):
    from mmengine.gpu import linear_kernels

    return linear_kernels


def layer(kernels, device, dtype, width, depth, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(width, depth, generator=generator), torch.randn(width, generator=generator)
    weight, bias = weight.to(device, dtype), bias.to(device, dtype)
    x = torch.randn(70, depth, generator=generator).to(device, dtype)
    return kernels.fixed_linear(weight, bias if has_bias else None), x, weight, bias


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 70),
    width=st.sampled_from([1, 31, 64, 100]),
    depth=st.sampled_from([1, 24, 128, 200]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_products_equal_torch(kernels, kernel_device, rows, width, depth, dtype, has_bias, seed):
    linear, x, weight, bias = layer(kernels, kernel_device, dtype, width, depth, has_bias, seed)
    wanted = x[:rows].double() @ weight.double().T + has_bias * bias.double()
    summed = x[:rows].double().abs() @ weight.double().abs().T + 1  # sum of absolute products
    bounds = torch.finfo(dtype).eps * wanted.abs() + 4e-6 * summed
    assert ((linear(x[:rows]) - wanted).abs() <= bounds).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(kernels, kernel_device, dots_in_order, dtype):
    """Rows in a batch of 70 have the same bits in smaller batches, and in a batch with NaN elsewhere."""
    linear, x, _, _ = layer(kernels, kernel_device, dtype, 40, 72, True, 1)
    whole = linear(x)
    for count in range(1, 71):
        start = count * 29 % (71 - count)
        assert torch.equal(linear(x[start : start + count]), whole[start : start + count]), count
    broken = torch.full_like(x, torch.nan)
    for place in (0, 17, 69):
        broken[place] = x[3]
        assert torch.equal(linear(broken)[place], whole[3])


def test_unaligned_and_strided_rows_give_the_same(kernels, kernel_device, dots_in_order):
    linear, x, _, _ = layer(kernels, kernel_device, torch.float16, 33, 40, False, 2)
    whole = linear(x)
    apart = torch.zeros(70, 43, dtype=x.dtype, device=kernel_device)
    apart[:, 1:41] = x
    odd = torch.zeros(70 * 40 + 1, dtype=x.dtype, device=kernel_device)[1:].view(70, 40)
    odd.copy_(x)
    assert torch.equal(linear(apart[:, 1:41]), whole) and torch.equal(linear(odd), whole)


def test_programs_cover_every_tile_once(kernels, kernel_device, dots_in_order, monkeypatch):
    """Rows have the same results together and alone, with complete and incomplete groups of row tiles."""
    linear, x, _, _ = layer(kernels, kernel_device, torch.float32, 150, 8, False, 3)
    x = x[:35]
    ones = torch.cat([linear(row[None]) for row in x])
    for group in (1, 2, 3, 8):
        monkeypatch.setattr(kernels, "GROUP", group)
        assert torch.equal(linear(x), ones)


@pytest.mark.parametrize(
    ("width", "columns"), [(24_576, 128), (12_288, 128), (6144, 64), (4096, 64), (2048, 32), (151_936, 128)]
)
def test_tiles_follow_from_the_width(kernels, width, columns):
    """Check the tiles for layers of Qwen3-VL-8B and Qwen3-VL-2B: at least 64 tiles, and over 2 MB of weights
    in flight.
    """
    tile = kernels.tile_of(width, torch.bfloat16)
    assert tile.columns == columns
    in_flight = width // tile.columns * (tile.stages - 1) * tile.columns * tile.depth * 2
    assert width // tile.columns >= 64 and in_flight > 2e6
    assert kernels.tile_of(width, torch.float32) == kernels.TILE_32

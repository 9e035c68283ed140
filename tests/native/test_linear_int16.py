"""Tests layers with int8 weights whose input rows are quantised to int16, for each instruction set that this
CPU has and that multiplies int16.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmengine.native.linear import (
    ChunkedCodes,
    Codes,
    Form,
    PackedLinear,
    RowForm,
    multiplies_int16,
    prefers_int16,
)
from tests.instruction_sets import isas, opened
from tests.native.test_linear_ints import drawn, exact

SHAPES = ((64, 256), (100, 130), (96, 1057), (34, 40), (2, 1), (40, 4864))
# 600 rows need two passes, because the kernels process up to 512 rows at a time.
ROWS = (*range(1, 41), 511, 600)
GROUP = 32  # How many values of x, and how many weights, share a scale.
MOST = 32639  # The largest code: 127 * 257.


@pytest.fixture
def library(library):
    if not multiplies_int16(library):
        pytest.skip("this instruction set does not multiply int16")
    return library


def layer_of(library, codes, **how):
    weight = ChunkedCodes(*codes.values.shape, Form.INT8, GROUP, [(0, codes)], row_form=RowForm.INT16)
    return PackedLinear(library, weight, **how)


def quantised(x):
    """Return x as integers, int64 [m, k], and their scales, float32 [m, k]. In a row, every 32 consecutive
    values share a scale.
    """
    blocks = np.pad(x.float().numpy(), ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)
    size = np.abs(blocks).max(2, keepdims=True)
    inverse = np.divide(np.float32(MOST), size, out=np.zeros_like(size), where=size > 0)
    codes = np.rint(blocks * inverse).astype(np.int64)
    scales = np.broadcast_to(size / np.float32(MOST), blocks.shape)
    return tuple(each.reshape(len(x), -1)[:, : x.shape[1]] for each in (codes, scales))


def test_sums_equal_those_of_the_quantised_rows(library):
    """The results equal the product of the quantised rows and the weights. A row's bits do not depend on the
    batch.
    """
    for n, k in SHAPES:
        codes = drawn(n, k, Form.INT8, GROUP, False)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
        layer, weight = layer_of(library, codes, bias=bias), exact(codes, GROUP)
        x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(k)).bfloat16()
        x[1] *= 1e3
        x[2, : k // 2] = 0
        found = layer(x, float32=True)
        integers, scales = quantised(x)
        rows = torch.from_numpy(integers * scales.astype(np.float64))
        wanted, size = rows @ weight.T + bias, rows.abs() @ weight.abs().T + bias.abs()
        assert ((found - wanted).abs() <= wanted.abs() * 2**-8 + size * 1e-6).all(), (n, k)
        for m in ROWS:
            assert torch.equal(layer(x[:m], float32=True), found[:m]), (n, k, m)
        for i in (0, 1, 7, 8, 39, 511, 512, 599):
            assert torch.equal(layer(x[i : i + 1], float32=True)[0], found[i]), (n, k, i)
        picked = layer.rows(torch.arange(-1, n))
        assert torch.equal(picked[1:], weight.float().bfloat16()) and not picked[0].any()


def test_quantising_changes_few_results(library):
    """Nearly all results equal the exact sums rounded to bfloat16."""
    codes = drawn(64, 2048, Form.INT8, GROUP, False)
    x = torch.randn(20, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = (x.double() @ exact(codes, GROUP).T).bfloat16()
    assert (layer_of(library, codes)(x) == wanted).float().mean() > 0.97


def test_every_instruction_set_gives_the_same_bits():
    codes = drawn(70, 288, Form.INT8, GROUP, False)
    x = torch.randn(20, 288, generator=torch.Generator().manual_seed(0)).bfloat16()
    libraries = [each for each in map(opened, isas()) if multiplies_int16(each)]
    if len(libraries) < 2:
        pytest.skip("fewer than two instruction sets multiply int16")
    first, *others = (layer_of(each, codes)(x) for each in libraries)
    assert all(torch.equal(first, other) for other in others)


def test_only_a_library_that_multiplies_int16_prefers_it():
    for isa in isas():
        each = opened(isa)
        assert multiplies_int16(each) or not prefers_int16(each)


@pytest.mark.parametrize("rows", (1, 3, 20))
def test_the_largest_codes_do_not_overflow(library, rows):
    """A sum of 32 products is at most 32 * 32,639 * 127, less than 2^27."""
    assert GROUP * MOST * 127 < 2**27
    for value in (127, -127):
        codes = Codes(torch.full((32, 256), value, dtype=torch.int8), torch.ones(32, 8))
        for x in (1.0, -1.0, 2.0**100, 2.0**-80):
            y = layer_of(library, codes)(torch.full((rows, 256), x).bfloat16())
            assert torch.allclose(y.float(), torch.full((rows, 32), 256.0 * value * x), rtol=2**-8, atol=0)


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_non_finite_values_stay_in_their_row(library, bad):
    for rows in (4, 7, 21):
        layer = layer_of(library, drawn(70, 96, Form.INT8, GROUP, False))
        x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
        clean = layer(x)
        x[3, 95] = bad
        y = layer(x)
        assert not y[3].isfinite().any()
        others = torch.arange(rows) != 3
        assert torch.equal(y[others], clean[others])


def test_threads_strides_and_gate_and_up(library):
    """If there are more threads than panels, threads also divide the rows."""
    codes, narrow = (drawn(n, 320, Form.INT8, GROUP, False) for n in (1400, 64))
    layers = [layer_of(library, codes, gate_up=gate_up) for gate_up in (True, False)]
    layers.append(layer_of(library, narrow))
    x = torch.randn(150, 350, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :320]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append([layer(x) for layer in layers])
    finally:
        torch.set_num_threads(before)
    for each in results[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(each, results[0], strict=True))
    gate, up = results[0][1].float().chunk(2, 1)
    wanted = F.silu(gate).bfloat16().float() * up
    assert torch.allclose(results[0][0].float(), wanted, rtol=2**-7, atol=1e-5)

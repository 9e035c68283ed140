"""Tests linear layers with integer weights and int8 inputs, for each instruction set of this CPU."""

import pytest
import torch
import torch.nn.functional as F

from mmengine.native.linear import GROUPS, ChunkedCodes, Codes, Form, PackedLinear, RowForm
from tests.instruction_sets import isas, opened
from tests.native.test_linear_ints import MOST, SHAPES, drawn, exact

ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 600)
BLOCK = 32  # How many values of x share a scale.


def layer_of(library, codes, form, group, **how):
    pieces = ChunkedCodes(
        *codes.values.shape, form, group, [(0, codes)], codes.mins is not None, RowForm.INT8
    )
    return PackedLinear(library, pieces, **how)


def rounded(x):
    """Return x (float64) as the kernels round it. The values in a block of 32 become multiples of m / 127,
    where m is the block's largest magnitude.
    """
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    most = blocks.abs().amax(2, keepdim=True)
    codes = torch.where(most > 0, blocks * (torch.tensor(127.0) / most), 0).round()
    return (codes.double() * (most / 127).double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("form", MOST)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mins", (False, True))
def test_sums_equal_rounded_rows(library, form, group, mins):
    """Results equal the product with rounded inputs, and a row's bits do not depend on the batch."""
    for n, k in SHAPES:
        codes = drawn(n, k, form, group, mins)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
        layer, weight = layer_of(library, codes, form, group, bias=bias), exact(codes, group)
        x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(k)).bfloat16()
        x[1] *= 1e3
        x[2, : k // 2] = 0
        found = layer(x, float32=True)
        wanted = rounded(x) @ weight.T + bias
        size = rounded(x).abs() @ weight.abs().T + bias.abs()
        assert ((found - wanted).abs() <= wanted.abs() * 2**-8 + size * 1e-6).all(), (n, k)
        for m in ROWS:
            assert torch.equal(layer(x[:m], float32=True), found[:m]), (n, k, m)
        rows = layer.rows(torch.arange(-1, n))
        assert torch.equal(rows[1:], weight.float().bfloat16()) and not rows[0].any()


@pytest.mark.parametrize("form", MOST)
@pytest.mark.parametrize("mins", (False, True))
def test_every_instruction_set_gives_the_same_bits(form, mins):
    codes = drawn(70, 288, form, 32, mins)
    x = torch.randn(20, 288, generator=torch.Generator().manual_seed(0)).bfloat16()
    first, *others = (layer_of(opened(isa), codes, form, 32)(x, float32=True) for isa in isas())
    assert all(torch.equal(first, other) for other in others)


def test_the_largest_codes_do_not_overflow(library):
    """With AVX2, the int4 kernel adds products in 16 bits, which could overflow."""
    for form, value in ((Form.INT8, 127), (Form.INT8, -127), (Form.INT4, 7), (Form.INT4, -8)):
        codes = Codes(torch.full((32, 256), value, dtype=torch.int8), torch.ones(32, 1))
        layer = layer_of(library, codes, form, 256)
        for x in (1.0, -1.0):
            y = layer(torch.full((3, 256), x).bfloat16(), float32=True)
            assert torch.allclose(y, torch.full_like(y, 256.0 * value * x), rtol=2**-8)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_non_finite_values_stay_in_their_row(library, bad):
    layer = layer_of(library, drawn(70, 96, Form.INT8, 32, False), Form.INT8, 32)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    clean = layer(x)
    x[3, 95] = bad
    y = layer(x)
    assert not y[3].isfinite().any()
    others = torch.arange(7) != 3
    assert torch.equal(y[others], clean[others])


def test_threads_and_gate_and_up(library):
    codes = drawn(1400, 320, Form.INT4, 64, True)
    layer, plain = (layer_of(library, codes, Form.INT4, 64, gate_up=gate_up) for gate_up in (True, False))
    x = torch.randn(30, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((layer(x), plain(x)))
    finally:
        torch.set_num_threads(before)
    for both in results[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(both, results[0], strict=True))
    gate, up = results[0][1].float().chunk(2, 1)
    wanted = F.silu(gate).bfloat16().float() * up
    assert torch.allclose(results[0][0].float(), wanted, rtol=2**-7, atol=1e-5)

"""Tests that FP8 layers compute the same bits as bfloat16 layers with dequantised weights, for each
instruction set of this CPU.
"""

import pytest
import torch

from mmengine.native.linear import GROUPS, ChunkedCodes, Codes, Form, PackedLinear

SHAPES = ((64, 256), (100, 130), (512, 384), (96, 1057), (34, 40), (2, 1))
ROWS = (1, 2, 3, 7, 12, 13, 24, 25, 40, 200)


def drawn(n, k, group, shared):
    """Return random codes [n, k] and scales [n, ceil(k / group)].

    Codes are never NaN, and never subnormal in the first third of the columns. Scales have both signs. With
    `shared`, the rows in each half of the matrix share scales; otherwise each row has its own scales.
    """
    random = torch.Generator().manual_seed(n * k)
    codes = torch.randint(0, 256, (n, k), generator=random).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80
    codes[:, : k // 3] |= torch.where(codes[:, : k // 3] & 0x78 == 0, 0x40, 0).to(torch.uint8)
    scales = torch.rand(n, -(-k // group), generator=random) * 1e-3 + 1e-5
    scales[torch.rand(scales.shape, generator=random) < 0.3] *= -1
    if shared:
        scales[: n // 2], scales[n // 2 :] = scales[0].clone(), scales[-1].clone()
    return codes, scales


def dequantised(codes, scales, group):
    columns = scales.repeat_interleave(group, 1)[:, : codes.shape[1]]
    return (codes.view(torch.float8_e4m3fn).float() * columns).bfloat16()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("gate_up", (False, True))
def test_bits_equal_the_dequantised_layer(library, group, shared, gate_up):
    for n, k in SHAPES:
        codes, scales = drawn(n, k, group, shared)
        cuts = (0, n // 3, n) if n > 2 else (0, n)
        pieces = [(a, Codes(codes[a:b], scales[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]
        bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
        held = PackedLinear(library, ChunkedCodes(n, k, Form.FP8, group, pieces), bias, gate_up=gate_up)
        plain = dequantised(codes, scales, group)
        wanted = PackedLinear(library, plain, bias, gate_up=gate_up)
        for m in ROWS:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
            assert torch.equal(held(x), wanted(x)), (n, k, m)
        if not gate_up:
            assert torch.equal(held.rows(torch.arange(-1, n))[1:], plain)


def test_every_code_is_its_value(library):
    """The product with a unit matrix contains each code's value, including subnormals."""
    codes = torch.arange(256).to(torch.uint8).repeat(32, 1)
    codes[codes & 0x7F == 0x7F] = 0
    held = PackedLinear(library, ChunkedCodes(32, 256, Form.FP8, 256, [(0, Codes(codes, torch.ones(32, 1)))]))
    x = torch.eye(256).bfloat16()
    wanted = codes.view(torch.float8_e4m3fn).float().T
    for rows in (1, 12, 64):
        for first in range(0, 256, rows):
            assert torch.equal(held(x[first : first + rows]).float(), wanted[first : first + rows])


def test_codes_take_a_byte(library):
    codes, scales = drawn(1024, 2048, 128, True)
    held = PackedLinear(library, ChunkedCodes(1024, 2048, Form.FP8, 128, [(0, Codes(codes, scales))]))
    assert held._packed.nbytes == 1024 * 2048 + 1024 * 16 * 4

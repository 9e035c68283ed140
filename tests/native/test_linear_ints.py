"""Tests linear layers with 8-bit and 4-bit integer weights, for each instruction set that this CPU has."""

from pathlib import Path

import pytest
import torch

from mmengine.native.linear import (
    GROUPS,
    ChunkedCodes,
    Codes,
    Form,
    PackedLinear,
    multiplies_float32,
    packed_buffer,
)

SHAPES = ((64, 256), (100, 130), (96, 1057), (34, 40), (2, 1))
# 600 rows need two passes, because the kernels process up to 512 rows at a time.
ROWS = (2, 3, 4, 5, 6, 7, 12, 13, 25, 40, 600)
ALONE = (*range(40), 511, 512, 599)
MOST = {Form.INT8: 127, Form.INT4: 7}


def drawn(n, k, form, group, mins):
    random = torch.Generator().manual_seed(n * k)
    least = -MOST[form] - (form is Form.INT4)
    codes = torch.randint(least, MOST[form] + 1, (n, k), generator=random).to(torch.int8)
    shape = (n, -(-k // group))
    scales = (torch.rand(shape, generator=random) * 1e-3 + 1e-5).half().float()
    return Codes(codes, scales, torch.randn(shape, generator=random) * 1e-2 if mins else None)


def exact(codes, group):
    """Return the dequantised weights, float64 [n, k]."""

    def spread(each):
        return each.double().repeat_interleave(group, 1)[:, : codes.values.shape[1]]

    weight = codes.values.double() * spread(codes.scales)
    return weight if codes.mins is None else weight + spread(codes.mins)


def held(library, codes, form, group, **how):
    n, k = codes.values.shape
    cuts = (0, n // 3, n) if n > 2 else (0, n)
    pieces = [
        (a, Codes(*(None if each is None else each[a:b] for each in codes)))
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    return PackedLinear(library, ChunkedCodes(n, k, form, group, pieces, codes.mins is not None), **how)


@pytest.mark.parametrize("form", MOST)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mins", (False, True))
def test_sums_are_near_the_exact_ones(library, form, group, mins):
    """A row's bits do not depend on the batch. The error limits allow for AMX, which rounds the weights to
    bfloat16.
    """
    for n, k in SHAPES:
        codes = drawn(n, k, form, group, mins)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
        layer, weight = held(library, codes, form, group, bias=bias), exact(codes, group)
        x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(k)).bfloat16()
        found = {m: layer(x[:m], float32=True) for m in ROWS}
        wanted = x.double() @ weight.T + bias
        size = x.double().abs() @ weight.abs().T + bias.abs()
        off = found[max(ROWS)] - wanted
        assert (off.abs() <= size * 2**-8).all(), (n, k)
        assert (off.pow(2).mean() / wanted.pow(2).mean()).sqrt() < 4e-3, (n, k)
        for m, rows in found.items():
            assert torch.equal(rows, found[max(ROWS)][:m]), (n, k, m)
        for i in ALONE:
            assert torch.equal(layer(x[i : i + 1], float32=True)[0], found[max(ROWS)][i]), (n, k, i)
        rows = layer.rows(torch.arange(-1, n))
        assert torch.equal(rows[1:], weight.float().bfloat16()) and not rows[0].any()


@pytest.mark.parametrize("form", MOST)
def test_gate_and_up(library, form):
    codes = drawn(96, 256, form, 64, True)
    layer, plain = held(library, codes, form, 64, gate_up=True), held(library, codes, form, 64)
    x = torch.randn(30, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    both = plain(x)
    wanted = (
        torch.nn.functional.silu(both[:, :48].float()).bfloat16().float() * both[:, 48:].float()
    ).bfloat16()
    assert torch.allclose(layer(x).float(), wanted.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("form", MOST)
def test_every_code_is_its_value(library, form):
    values = torch.arange(-MOST[form] - (form is Form.INT4), MOST[form] + 1).to(torch.int8)
    codes = Codes(values.repeat(32, 1), torch.ones(32, -(-len(values) // 256)))
    layer = held(library, codes, form, 256)
    x = torch.eye(len(values)).bfloat16()
    for rows in (1, 12, len(x)):
        found = torch.cat([layer(part) for part in x.split(rows)])
        assert torch.equal(found.float(), codes.values.float().T)


def test_memory_of_codes(library):
    for form, group, mins, size in (
        (Form.INT8, 32, False, 34 / 32),
        (Form.INT4, 128, False, 66 / 128),
        (Form.INT4, 128, True, 70 / 128),
    ):
        layer = held(library, drawn(1024, 2048, form, group, mins), form, group)
        assert layer._packed.nbytes == 1024 * 2048 * size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_a_buffer_takes_no_huge_page_that_it_does_not_fill():
    def private():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    size, before = 4 * 2**20 + 130_000, private()
    buffers = [packed_buffer(size) for _ in range(32)]
    for buffer in buffers:
        buffer[:] = 1
    # With a huge page at its end, a buffer would take 1.5 times its size.
    assert private() - before < 1.2 * 32 * size


@pytest.mark.parametrize("form", MOST)
@pytest.mark.parametrize("mins", (False, True))
def test_float32_rows_are_not_rounded(library, form, mins):
    """Float32 layers can have integer codes only on CPUs without bfloat16 instructions."""
    if not multiplies_float32(library):
        pytest.skip("these kernels multiply bfloat16")
    codes = drawn(96, 1057, form, 32, mins)
    pieces = ChunkedCodes(96, 1057, form, 32, [(0, codes)], mins, dtype=torch.float32)
    layer, weight = PackedLinear(library, pieces), exact(codes, 32)
    x = torch.randn(40, 1057, generator=torch.Generator().manual_seed(0))
    found = layer(x)
    size = x.double().abs() @ weight.abs().T
    assert ((found - x.double() @ weight.T).abs() <= size * 2**-20).all()
    for i in (0, 7, 39):
        assert torch.equal(layer(x[i : i + 1])[0], found[i])
    assert torch.equal(layer.rows(torch.arange(96)), weight.float())

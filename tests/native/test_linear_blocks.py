"""Tests linear layers with quantised weights from GGUF files: the decoded weights, products with any number
of input rows, and layers that join matrices with several types.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmengine.checkpoint.gguf.types import BLOCKS, TYPES
from mmengine.native.blocks import ChunkedBlocks, multiplies_blocks, runs_of
from mmengine.native.linear import PackedLinear, packed_bytes
from tests.gguf.writing import packed

ROWS = (2, 3, 7, 16, 600)  # 600 rows need two passes: the kernels process up to 512 rows at a time.


@pytest.fixture
def kernels(library):
    return checked(library, torch.float32)


@pytest.fixture
def paired_kernels(library):
    return checked(library, torch.bfloat16)


def checked(library, dtype: torch.dtype):
    if not multiplies_blocks(library, dtype):
        pytest.skip(f"these kernels multiply no blocks in {dtype}")
    return library


def rounds_weights(library) -> bool:
    """Return whether bfloat16 layers round weights to bfloat16. Only AMX kernels do."""
    return "-amx-" in Path(library._name).name


def blocks(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.frombuffer(packed(kind, (n, k), seed), np.uint8).reshape(n, -1)


def weights(kind: str, rows: np.ndarray) -> torch.Tensor:
    """Decode the blocks to float32 [n, k]. Other tests compare this decoder with the package gguf."""
    of = TYPES[BLOCKS[kind].number]
    return torch.from_numpy(np.array(of.decode(rows.reshape(-1, of.bytes)))).view(len(rows), -1)


def chunked(kinds: dict[str, np.ndarray], k: int, dtype: torch.dtype = torch.float32) -> ChunkedBlocks:
    """Join matrices of several types, each in two chunks."""
    runs = runs_of((len(rows), BLOCKS[kind].number) for kind, rows in kinds.items())
    chunks, row = [], 0
    for rows in kinds.values():
        cut = len(rows) // 3
        chunks += [(row, torch.tensor(rows[:cut])), (row + cut, torch.tensor(rows[cut:]))]
        row += len(rows)
    return ChunkedBlocks(row, k, runs, chunks, dtype)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("kind", BLOCKS)
def test_decoded_weights_are_those_of_the_file(library, kind):
    """The unpacked weights equal the file's weights bit for bit, on every instruction set."""
    rows = blocks(kind, 70, 512)
    layer = PackedLinear(library, chunked({kind: rows}, 512))
    found = layer.rows(torch.arange(-1, 70))
    assert torch.equal(bits(found[1:]), bits(weights(kind, rows))) and not found[0].any()


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_equal_those_of_float32_weights(kernels, kind):
    """The outputs have the same bits as with decoded weights, for any number of rows."""
    rows = blocks(kind, 100, 768, seed=1)
    bias = torch.randn(100, generator=torch.Generator().manual_seed(1))
    layer = PackedLinear(kernels, chunked({kind: rows}, 768), bias)
    plain = PackedLinear(kernels, weights(kind, rows), bias)
    x = torch.randn(max(ROWS), 768, generator=torch.Generator().manual_seed(2))
    wanted = plain(x)
    assert wanted.isfinite().all() and (wanted != 0).all()
    for m in ROWS:
        assert torch.equal(layer(x[:m]), wanted[:m]), m
    for i in (0, 1, 99):
        assert torch.equal(layer(x[i : i + 1])[0], wanted[i]), i


@pytest.mark.parametrize("kind", BLOCKS)
def test_bfloat16_layers_return_the_rounded_weights(paired_kernels, kind):
    rows = blocks(kind, 70, 512)
    layer = PackedLinear(paired_kernels, chunked({kind: rows}, 512, torch.bfloat16))
    found = layer.rows(torch.arange(-1, 70))
    assert torch.equal(found[1:], weights(kind, rows).bfloat16()) and not found[0].any()


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_in_bfloat16(paired_kernels, kind):
    """The outputs are rounded to bfloat16. AMX kernels also round the weights, and give the same bits as a
    layer with bfloat16 weights. A row's bits do not depend on the number of rows.
    """
    rows = blocks(kind, 100, 768, seed=1)
    bias = torch.randn(100, generator=torch.Generator().manual_seed(1))
    layer = PackedLinear(paired_kernels, chunked({kind: rows}, 768, torch.bfloat16), bias)
    x = torch.randn(max(ROWS), 768, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = layer(x)
    if rounds_weights(paired_kernels):
        assert torch.equal(found, PackedLinear(paired_kernels, weights(kind, rows).bfloat16(), bias)(x))
    else:
        terms = x.double().abs() @ weights(kind, rows).double().abs().T
        wanted = x.double() @ weights(kind, rows).double().T + bias.double()
        assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + terms * 1e-5).all()
    for m in (*ROWS, 4, 5, 32, 33):
        assert torch.equal(layer(x[:m]), found[:m]), m
    for i in (0, 1, 99):
        assert torch.equal(layer(x[i : i + 1])[0], found[i]), i


def test_panels_of_several_types_in_bfloat16(paired_kernels):
    kinds = {kind: blocks(kind, n, 256, n) for kind, n in (("Q2_K", 64), ("Q8_0", 32), ("Q5_K", 40))}
    layer = PackedLinear(paired_kernels, chunked(kinds, 256, torch.bfloat16))
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = [
        PackedLinear(paired_kernels, chunked({kind: rows}, 256, torch.bfloat16))(x)
        for kind, rows in kinds.items()
    ]
    assert torch.equal(layer(x), torch.cat(alone, 1))


def test_panels_of_several_types(kernels):
    kinds = {kind: blocks(kind, n, 256, n) for kind, n in (("Q4_K", 64), ("Q8_0", 32), ("Q6_K", 40))}
    layer = PackedLinear(kernels, weight := chunked(kinds, 256))
    assert weight.runs == ((0, 12), (2, 8), (3, 14))
    joined = torch.cat([weights(kind, rows) for kind, rows in kinds.items()])
    plain = PackedLinear(kernels, joined)
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), plain(x)) and torch.equal(layer(x[:1]), plain(x[:1]))
    assert torch.equal(layer.rows(torch.arange(136)), joined)


def test_matrices_that_share_a_panel():
    assert runs_of([(40, 12), (40, 12)]) == ((0, 12),)
    assert runs_of([(40, 12), (40, 14)]) is None
    assert runs_of([(64, 12), (32, 14), (32, 14)]) == ((0, 12), (2, 14))


@pytest.mark.parametrize("kind", ("Q4_K", "Q6_K", "Q5_0"))
def test_gate_and_up(kernels, kind):
    rows = blocks(kind, 96, 256)
    layer = PackedLinear(kernels, chunked({kind: rows}, 256), gate_up=True)
    plain = PackedLinear(kernels, weights(kind, rows), gate_up=True)
    x = torch.randn(30, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), plain(x)) and torch.equal(layer(x[:1]), plain(x[:1]))
    both = chunked({kind: rows[:32], "Q8_0": blocks("Q8_0", 32, 256)}, 256)
    with pytest.raises(ValueError, match="gate and up have blocks of different types"):
        PackedLinear(kernels, both, gate_up=True)


@pytest.mark.parametrize("kind", ("Q4_K", "Q6_K", "Q5_0"))
def test_gate_and_up_in_bfloat16(paired_kernels, kind):
    weight = chunked({kind: blocks(kind, 96, 256)}, 256, torch.bfloat16)
    layer = PackedLinear(paired_kernels, weight, gate_up=True)
    apart = chunked({kind: blocks(kind, 96, 256)}, 256, torch.bfloat16)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate, up = PackedLinear(paired_kernels, apart)(x).float().split(48, 1)
    wanted = torch.nn.functional.silu(gate).bfloat16().float() * up
    assert torch.allclose(layer(x).float(), wanted, rtol=2**-7, atol=1e-6)
    assert torch.equal(layer(x[:1]), layer(x)[:1])


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_zero_keeps_its_sign(library, kind):
    """A block whose scale and minimum are -0.0 decodes to zeros, which may be negative."""
    rows = blocks(kind, 32, 256).copy().reshape(-1, TYPES[BLOCKS[kind].number].bytes)
    for at in BLOCKS[kind].halves:
        rows[:, at : at + 2] = np.array([np.float16(-0.0)] * len(rows)).view(np.uint8).reshape(-1, 2)
    found = PackedLinear(library, chunked({kind: rows.reshape(32, -1)}, 256)).rows(torch.arange(32))
    assert torch.equal(bits(found), bits(weights(kind, rows.reshape(32, -1))))


def test_bytes_of_blocks(library):
    """A packed matrix takes at most 1.05 times the file's bytes."""
    for kind, of in BLOCKS.items():
        rows = blocks(kind, 64, 1024)
        assert rows.nbytes <= packed_bytes(library, chunked({kind: rows}, 1024)) <= 1.05 * rows.nbytes, of

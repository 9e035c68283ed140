"""Tests the LoRA kernels: the sums, and that a row's bits do not depend on other rows."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmengine.checkpoint.peft import LoraPair
from mmengine.checkpoint.tensors import TensorEntry
from mmengine.models.decoder.lora_parts import _gates_behind
from mmengine.native.dtypes import DTYPES
from mmengine.native.lora import LoraPart, LoraStep, PackedAdapter, add_all, declare_functions

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPE = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])


def drawn(seed, *shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts_of(seed, k, *sizes, dtype):
    """Return a random LoraPart for each (rank, n) in `sizes`. The parts cover adjacent columns in y."""
    found, offset = [], 0
    for number, (rank, n) in enumerate(sizes):
        a = drawn(seed + number, rank, k, dtype=dtype) / k**0.5
        b = drawn(seed + number + 50, n, rank, dtype=dtype) / rank**0.5
        found.append(LoraPart(a, b, offset, 0.5 + number))
        offset += n
    return found


def wanted(x, y, parts):
    y = y.double().clone()
    for a, b, offset, scale in parts:
        y[:, offset : offset + len(b)] += scale * (x.double() @ a.double().t() @ b.double().t())
    return y


@DTYPE
@pytest.mark.parametrize("m", [1, 3, 4, 9, 70])
@pytest.mark.parametrize("k, sizes", [(64, [(16, 48)]), (37, [(3, 5), (20, 33)]), (130, [(8, 600), (1, 17)])])
def test_sums(library, dtype, m, k, sizes):
    parts = parts_of(1, k, *sizes, dtype=dtype)
    width = sum(n for _, n in sizes) + 3
    x, y = drawn(2, m, k + 5, dtype=dtype)[:, :k], drawn(3, m, width, dtype=dtype)
    found = y.clone()
    add_all(library, PackedAdapter([parts]), x, found)
    torch.testing.assert_close(
        found.double(), wanted(x, y, parts), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(found[:, -3:], y[:, -3:]), "columns without a part do not change"


@DTYPE
def test_queries_with_gates_take_the_memory_that_is_counted(library, dtype):
    """q and its gates are not adjacent in y, so they become two LoraParts. Both share matrix a, which is
    stored once.
    """
    config = SimpleNamespace(num_heads=2, head_dim=16, num_kv_heads=1)
    both, keys, values = parts_of(1, 96, (20, 64), (6, 16), (6, 16), dtype=dtype)
    packed = PackedAdapter([tuple(_gates_behind(config, (both, keys, values)))])
    pairs = [LoraPair(entry(each.a), entry(each.b), each.scale) for each in (both, keys, values)]
    assert len(packed._memory) == sum(pair.num_bytes(dtype.itemsize) for pair in pairs)
    x, y = drawn(2, 7, 96, dtype=dtype), drawn(3, 7, 96, dtype=dtype)
    found = y.clone()
    add_all(library, packed, x, found)
    queries, gates = both.b.view(2, 2, 16, -1).transpose(0, 1).reshape(2, 32, -1)
    parts = [both._replace(b=queries), keys._replace(offset=32), values._replace(offset=48)]
    parts.append(both._replace(b=gates, offset=64))
    torch.testing.assert_close(
        found.double(), wanted(x, y, parts), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def entry(matrix):
    return TensorEntry(Path(), "", "F32", tuple(matrix.shape), 0, 0)


@DTYPE
def test_each_row_has_its_adapter_and_batch_independent_bits(library, dtype):
    k, m = 96, 23
    adapters = [parts_of(10 * each, k, (16, 40), (5, 24), dtype=dtype) for each in range(3)]
    x, y = drawn(4, m, k, dtype=dtype), drawn(5, m, 64, dtype=dtype)
    rows = [np.arange(each, m, 4, dtype=np.int32) for each in range(3)]  # Every fourth row has no adapter.
    step = LoraStep([(PackedAdapter([(), parts]), own) for parts, own in zip(adapters, rows, strict=True)])
    found = y.clone()
    arguments = (x.data_ptr(), x.stride(0), found.data_ptr(), found.stride(0), DTYPES[dtype])
    assert declare_functions(library).mm_lora_add(step.address, 0, *arguments) == 0 and torch.equal(found, y)
    assert declare_functions(library).mm_lora_add(step.address, 1, *arguments) == 0
    assert torch.equal(found[3::4], y[3::4])
    for parts, own in zip(adapters, rows, strict=True):
        for row in own.tolist():
            alone = y[row : row + 1].clone()
            add_all(library, PackedAdapter([parts]), x[row : row + 1], alone)
            assert torch.equal(alone[0], found[row])

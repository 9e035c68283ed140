"""Tests the KV pool's memory, and the error for an unknown attention backend."""

import gc
from pathlib import Path

import pytest
import torch

from mmengine.errors import ConfigError
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.kv.pool import KVPool, blocks_for_memory, bytes_per_block
from tests.native.attention_cases import spec_of


def test_unknown_backend_is_named_with_the_known_ones():
    spec = spec_of(4, 2, 32)
    pool = KVPool(spec, 4, 4, torch.float32, CpuDevice())
    with pytest.raises(ConfigError, match="'flash'.*auto, flashinfer, native, torch, triton"):
        make_backend("flash", spec, pool)


def test_blocks_for_memory():
    spec = spec_of(4, 2, 32, layers=3)
    assert bytes_per_block([spec], torch.bfloat16, 16) == 3 * 2 * 16 * 2 * 32 * 2
    assert blocks_for_memory(12288, 16, 12288 * 7 + 12287) == 7
    assert blocks_for_memory(24576, 16, 12288 * 4) == 2
    with pytest.raises(ConfigError, match="are too few for a KV cache"):
        blocks_for_memory(24576, 16, 12288 * 4 - 1)
    with pytest.raises(ConfigError, match="num_blocks must be at least 2"):
        KVPool(spec, 1, 16, torch.float32, CpuDevice())
    with pytest.raises(ConfigError, match="lower num_blocks"):
        KVPool(spec, 2**40, 16, torch.float32, CpuDevice())


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_a_pool_takes_memory_when_it_is_written_to():
    # The operating system allocates a page of the pool at the first write to the page.
    def private():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) * 1024

    gc.collect()  # garbage from earlier tests must not be freed during the measurement
    before, spec = private(), spec_of(4, 2, 64, layers=2)
    pool = KVPool(spec, 16_384, 16, torch.bfloat16, CpuDevice())
    assert pool.blocks.nbytes == 256 * 2**20
    assert private() - before < 16 * 2**20
    assert not pool.blocks[:, ::1000].any()
    pool.blocks[:, 1:9] = 1
    assert 2**16 <= private() - before < 32 * 2**20

"""Feeds random rows to attention backends, and compares the results with dense attention."""

import numpy as np
import torch

from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.kv.pool import KVPool

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def spec_of(heads: int, kv_heads: int, head_dim: int, layers: int = 2) -> ModelSpec:
    return ModelSpec(layers, heads, kv_heads, head_dim, heads * head_dim, 64, 4096, 0, 8)


def dense(q, k, v):
    """Return causal attention for a row's last s tokens, in float32. q: [s, Hq, D]. k, v: [n, Hkv, D]."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    s, n = scores.shape[1:]
    visible = torch.arange(n)[None, :] <= torch.arange(n - s, n)[:, None]
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(0, 1)


class Rows:
    """Rows with random q, k and v in random blocks. `step` runs a backend and checks its results."""

    def __init__(self, make, spec: ModelSpec, dtype, block_size=4, num_blocks=96, seed=0, device="cpu"):
        self.device = torch.device(device)
        self.spec, self.dtype, self.block_size = spec, dtype, block_size
        self.random = np.random.default_rng(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        self.pool = KVPool(spec, num_blocks, block_size, dtype, open_device(str(device)))
        # Earlier requests may leave NaN in blocks, except in block 0, the dummy block.
        self.pool.blocks[:, 1:] = float("nan")
        self.backend = make(spec, self.pool)
        self.free = self.random.permutation(np.arange(1, num_blocks)).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.kv: dict[str, torch.Tensor] = {}  # [layers, 2, n, Hkv, D]

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.torch_random).to(self.dtype)

    def share(self, name: str, source: str, num_tokens: int) -> None:
        """Begin the row `name` with the first blocks of the row `source`. `num_tokens`: a multiple of the
        block size.
        """
        self.blocks[name] = self.blocks[source][: num_tokens // self.block_size]
        self.kv[name] = self.kv[source][:, :, :num_tokens]

    def step(self, *work: tuple[str, int]) -> None:
        spec, queries = self.spec, []
        slots, lens, table = [], [], []
        fresh_kv = []
        for name, count in work:
            old = self.kv.get(name, torch.zeros(spec.num_layers, 2, 0, spec.num_kv_heads, spec.head_dim))
            new = self.draw(spec.num_layers, 2, count, spec.num_kv_heads, spec.head_dim)
            self.kv[name] = torch.cat((old.to(self.dtype), new), 2)
            blocks = self.blocks.setdefault(name, [])
            blocks = self.blocks[name] = list(blocks)
            while len(blocks) * self.block_size < old.shape[2] + count:
                blocks.append(self.free.pop())
            places = np.arange(old.shape[2], old.shape[2] + count)
            slots.append(
                np.array(blocks)[places // self.block_size] * self.block_size + places % self.block_size
            )
            lens.append(old.shape[2] + count)
            table.append(blocks)
            queries.append(self.draw(spec.num_layers, count, spec.num_heads, spec.head_dim))
            fresh_kv.append(new)
        width = max(map(len, table)) + int(self.random.integers(0, 3))
        # The block table is padded with random blocks, which may belong to other rows.
        behind = self.random.integers(0, self.pool.num_blocks, width).tolist()
        padded = np.array([blocks + behind[len(blocks) :] for blocks in table])
        slots, lens = np.concatenate(slots), np.array(lens, np.int32)
        fresh = slots[slots % self.block_size == 0] // self.block_size
        if self.backend.reads_unwritten:
            self.pool.clear(torch.from_numpy(fresh).to(self.device))
        counts = np.array([count for _, count in work], np.int32)
        wider = np.concatenate((padded, self.random.integers(0, self.pool.num_blocks, padded.shape)), axis=1)
        table = wider.astype(np.int32)[:, :width]  # The stride between rows is larger than the width.
        self.backend.begin(AttentionMeta(counts, lens, slots, table))
        self.check(work, torch.cat(queries, 1), torch.cat(fresh_kv, 2))

    def check(self, work, queries, new):
        for layer in range(self.spec.num_layers):
            self.backend.append(layer, *new[layer].to(self.device))
            out = self.backend.run(layer, queries[layer].to(self.device)).cpu()
            assert out.shape == queries[layer].shape
            assert out.dtype == self.dtype
            start = 0
            for name, count in work:
                want = dense(queries[layer][start : start + count], *self.kv[name][layer])
                torch.testing.assert_close(
                    out[start : start + count].float(), want, atol=TOLERANCE[self.dtype], rtol=0.02
                )
                start += count

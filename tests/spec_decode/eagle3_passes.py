"""Load draft heads with a fake target, and run them over ragged batches with a paged cache."""

import numpy as np
import torch

from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.drafting.eagle3.loading import load_head
from mmengine.spec_decode.eagle3.loading import open_head
from tests.qwen3_vl.qwen3_vl_reference import PagedRows, ragged_steps
from tests.spec_decode.eagle3_heads import TARGET

CPU = torch.device("cpu")
FIRST_LAYER = 2  # index of the head's first layer in the cache; the target's layers come before
LENGTHS = (9, 1, 14)


class FakeTarget:
    """A fake target with all methods that a head calls."""

    def __init__(self, dtype=torch.float32):
        g = torch.Generator().manual_seed(11)
        self.embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=g).to(dtype)
        self.matrix = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=g).to(dtype) / 4

    def embed(self, input_ids):
        return self.embedding[input_ids]

    def logits(self, hidden):
        return (hidden @ self.matrix.T).float()


def load(written, folder, dtype=torch.float32, target=None):
    head_folder = open_head(written.save(folder), TARGET)
    return load_head(head_folder, target or FakeTarget(dtype), Placement(CpuDevice(), dtype))


def cache(head, compute, num_rows):
    c = head.config
    spec = ModelSpec(FIRST_LAYER + c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, 1, 1, 128, 0, 1)
    backend = NativePagedAttention if compute == "kernels" else TorchPagedAttention
    return OpenCache(backend, spec, head.dtype, num_rows)


class OpenCache(PagedRows):
    """An attention backend whose pool can be inspected."""

    def __init__(self, make, spec, dtype, num_rows):
        def kept(spec, pool):
            self._pool = pool
            return make(spec, pool)

        super().__init__(kept, spec, dtype, num_rows)
        self.table, self.block_size = self._table, self._size

    def begin(self, step):
        """Begin a step. `step` is a list of (row, count), as in PagedRows, or the backend's own description
        of a step.
        """
        if isinstance(step, list):
            super().begin(step)
        else:
            self._backend.begin(step)

    def pool(self, layer):
        """Return a layer's KV pool, [block, 2, offset, num_kv_heads, head_dim]."""
        return self._pool.layers[layer]

    def tokens_of(self, layer, row, length):
        """Return K and V of a row's first tokens, [2, length, num_kv_heads, head_dim]."""
        blocks = torch.from_numpy(self.table[row].astype(np.int64))
        return self.pool(layer)[blocks].transpose(0, 1).flatten(1, 2)[:, :length]


def sequences(head, seed=12, lengths=LENGTHS):
    """Return (auxiliary states [n, 3 * H], next tokens [n], positions [3, n]) for each row. The three axes of
    the positions differ, as with images.
    """
    g = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        positions = torch.randint(0, 40, (3, length), generator=g)
        aux_hidden_states = 3 * torch.randn(length, 3 * TARGET.hidden_size, generator=g)
        made.append(
            (
                aux_hidden_states.to(head.dtype),
                torch.randint(0, TARGET.vocab_size, (length,), generator=g),
                positions,
            )
        )
    return made


def run_ragged(head, rows, attention):
    """Return each row's z and carry, the results of `head.forward`, computed in chunks of random length with
    several rows per step.
    """
    steps = ragged_steps([Sequence(len(tokens)) for _, tokens, _ in rows], np.random.default_rng(13), 5)
    done, got = [0] * len(rows), [[] for _ in rows]
    for step in steps:
        cuts = [(row, slice(done[row], done[row] + count)) for row, count in step]
        attention.begin(step)
        with torch.inference_mode():
            outputs = head.forward(
                head.fuse(torch.cat([rows[row][0][cut] for row, cut in cuts])),
                head.embed(torch.cat([rows[row][1][cut] for row, cut in cuts])),
                torch.cat([rows[row][2][:, cut] for row, cut in cuts], 1),
                attention,
                FIRST_LAYER,
            )
        parts = zip(*(one.split([count for _, count in step]) for one in outputs), strict=True)
        for (row, count), part in zip(step, parts, strict=True):
            got[row].append(part)
            done[row] += count
    return [tuple(torch.cat(one) for one in zip(*parts, strict=True)) for parts in got]


class Sequence:
    def __init__(self, length):
        self.ids = range(length)

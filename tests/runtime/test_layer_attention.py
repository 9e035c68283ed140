"""Tests that attention in ragged batches over paged KV equals transformers' eager attention. The layers have
windows, chunks, soft caps, sinks, scales, shared KV, and runs of tokens that see one another.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as with_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from mmengine.errors import ConfigError
from mmengine.models.plugin import LayerAttention, ModelSpec
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.layered import LayeredAttention
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.kv.pool import KVPool

HEADS, KV_HEADS, WIDTH, SIZE = 4, 2, 16, 4
LAYERS = {
    "plain": LayerAttention(0),
    "window": LayerAttention(1, window=7),
    "a window of a block": LayerAttention(2, window=SIZE),
    "chunks": LayerAttention(3, chunk=6),
    "soft cap": LayerAttention(4, softcap=2.0),
    "scale": LayerAttention(5, scale=0.5),
    "sinks": LayerAttention(6, has_sinks=True),
    "window, soft cap and scale": LayerAttention(7, window=5, softcap=1.5, scale=0.3),
    "window and sinks": LayerAttention(8, window=6, has_sinks=True),
    "runs": LayerAttention(9, sees_runs=True),
    "window and runs": LayerAttention(10, window=5, sees_runs=True),
    "plain with another layer's KV": LayerAttention(0),
    "window with another layer's KV": LayerAttention(1, window=7),
}
SPEC = ModelSpec(
    *(len(LAYERS), HEADS, KV_HEADS, WIDTH, HEADS * WIDTH, 64, 4096, 0, 8),
    attention=tuple(LAYERS.values()),
    runs="run",
    atomic_runs=True,
)
SINKS = torch.linspace(-1, 2, HEADS)
# STEPS holds (row, number of new tokens) for each row in each step. RUNS holds (first token, length) for each
# row's runs, in which all tokens see one another.
STEPS = (
    (("a", 5), ("b", 13), ("c", 1)),
    (("a", 1), ("b", 9), ("c", 1), ("d", 13)),
    (("a", 12), ("b", 1), ("c", 1), ("d", 1)),
    (("a", 1), ("b", 1), ("c", 1), ("d", 2)),
    (("a", 4), ("b", 4), ("c", 3)),
)
RUNS = {"a": ((6, 9),), "b": ((2, 3), (13, 7)), "d": ((0, 13),)}


def run_ids(name, length):
    ids = np.full(length, -1, np.int32)
    for number, (start, count) in enumerate(RUNS.get(name, ())):
        ids[start : start + count] = number
    return ids[:length]


def eager(layer, q, k, v, ids):
    """Return transformers' attention of a row's last len(q) tokens."""
    count, length = len(q), len(k)
    queries, keys = np.arange(length - count, length)[:, None], np.arange(length)
    visible = keys <= queries
    if layer.sees_runs:
        visible = visible | ((ids[queries] >= 0) & (ids[queries] == ids[keys]))
    if layer.window:
        visible = visible & (keys > queries - layer.window)
    if layer.chunk:
        visible = visible & (keys // layer.chunk == queries // layer.chunk)
    mask = torch.where(torch.from_numpy(visible), 0.0, float("-inf"))[None, None]
    module = SimpleNamespace(
        num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=SINKS, head_dim=WIDTH
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    scale = layer.scale or WIDTH**-0.5
    if layer.has_sinks:
        return with_sinks(module, q, k, v, mask, scaling=scale, dropout=0.0)[0][0]
    return with_softcap(module, q, k, v, mask, scaling=scale, softcap=layer.softcap or None)[0][0]


class Batch:
    """Rows with random q, k and v. Their KV blocks are allocated in random order, and first contain NaN."""

    def __init__(self, spec, make, dtype=torch.float32):
        self.spec, self.dtype = spec, dtype
        self.pool = KVPool(spec, 64, SIZE, dtype, open_device("cpu"))
        self.pool.blocks[:, 1:] = float("nan")
        self.backend = make(spec, self.pool)
        self.random = torch.Generator().manual_seed(3)
        self.free = np.random.default_rng(3).permutation(np.arange(1, 64)).tolist()
        self.blocks, self.lengths = {}, {}
        self.kv = {}  # (row, layer) -> k and v, [2, n, KV_HEADS, WIDTH]

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def meta(self, step):
        slots, ids = [], []
        for name, count in step:
            before = self.lengths.get(name, 0)
            self.lengths[name] = before + count
            own = self.blocks.setdefault(name, [])
            while len(own) * SIZE < before + count:
                own.append(self.free.pop())
                if self.backend.reads_unwritten:
                    self.pool.clear(torch.tensor(own[-1:]))
            places = np.arange(before, before + count)
            slots += [own[place // SIZE] * SIZE + place % SIZE for place in places]
            ids.append(run_ids(name, 64)[before : before + count])
        table = np.zeros((len(step), max(len(self.blocks[name]) for name, _ in step)), np.int32)
        for row, (name, _) in enumerate(step):
            table[row, : len(self.blocks[name])] = self.blocks[name]
        counts = np.array([count for _, count in step], np.int32)
        lengths = np.array([self.lengths[name] for name, _ in step], np.int32)
        return AttentionMeta(counts, lengths, np.array(slots), table, run_ids=np.concatenate(ids))

    def step(self, step, layer):
        """Run a layer after `begin` set the step's metadata. Return the result and transformers' result."""
        described = self.spec.attention[layer]
        total = sum(count for _, count in step)
        q, starts = self.draw(total, HEADS, WIDTH), np.cumsum([0, *(count for _, count in step)])
        if described.kv_layer == layer:
            k, v = self.draw(total, KV_HEADS, WIDTH), self.draw(total, KV_HEADS, WIDTH)
            self.backend.append(layer, k, v)
            for row, (name, _) in enumerate(step):
                own = torch.stack((k, v))[:, starts[row] : starts[row + 1]]
                old = self.kv.get((name, layer), own[:, :0])
                self.kv[name, layer] = torch.cat((old, own), 1)
        found = self.backend.run(layer, q, SINKS.to(self.dtype) if described.has_sinks else None)
        wanted = [
            eager(
                described,
                q[starts[row] : starts[row + 1]],
                *self.kv[name, described.kv_layer],
                run_ids(name, 64),
            )
            for row, (name, _) in enumerate(step)
        ]
        return found, torch.cat(wanted)


@pytest.mark.parametrize("name", ["torch", "auto"])
def test_each_layer_is_that_of_transformers(name):
    batch = Batch(SPEC, lambda spec, pool: make_backend(name, spec, pool))
    for step in STEPS:
        batch.backend.begin(batch.meta(step))
        for layer, what in enumerate(LAYERS):
            found, wanted = batch.step(step, layer)
            torch.testing.assert_close(
                found, wanted, rtol=0, atol=2e-6, msg=lambda text, w=what: f"{w}: {text}"
            )


def test_layers_in_bfloat16_differ_by_rounding():
    batch = Batch(SPEC, lambda spec, pool: make_backend("auto", spec, pool), torch.bfloat16)
    for step in STEPS:
        batch.backend.begin(batch.meta(step))
        for layer in range(len(LAYERS)):
            found, wanted = batch.step(step, layer)
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.03)


def test_scores_are_computed_in_tiles(monkeypatch):
    """Results stay the same if MAX_SCORES allows only small tiles."""
    monkeypatch.setattr("mmengine.runtime.attention.masked_paged.MAX_SCORES", 100)
    test_each_layer_is_that_of_transformers("torch")


def test_plain_layers_keep_the_fast_backend_and_shared_layers_need_no_pool():
    # SPEC's last two layers read the KV of layers 0 and 1, so the pool has no place for them.
    pool = KVPool(SPEC, 8, SIZE, torch.float32, open_device("cpu"))
    assert len(pool.layers) == 11 == SPEC.num_kv_layers
    assert SPEC.kv_places[-2:] == (0, 1)
    assert isinstance(make_backend("auto", SPEC, pool), LayeredAttention)
    plain = replace(SPEC, attention=())
    assert not isinstance(
        make_backend("auto", plain, KVPool(plain, 8, SIZE, torch.float32, open_device("cpu"))),
        LayeredAttention,
    )


REFUSED = {
    "'flashinfer' does not compute windows, chunks, soft caps, sinks, scales, runs": ("flashinfer", SPEC),
    "2 attention layers are described; the model has 13": (
        "auto",
        replace(SPEC, attention=SPEC.attention[:2]),
    ),
    "attention layer 1 reads the KV of layer 2": (
        "auto",
        replace(SPEC, num_layers=3, attention=(LayerAttention(0), LayerAttention(2), LayerAttention(2))),
    ),
    "tokens of a run see one another, but a step may compute a part of them": (
        "auto",
        replace(SPEC, atomic_runs=False),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_no_backend_computes_is_refused(words):
    name, spec = REFUSED[words]
    with pytest.raises(ConfigError, match=words):
        make_backend(name, spec, KVPool(SPEC, 8, SIZE, torch.float32, open_device("cpu")))


def test_batch_invariant_needs_plain_layers():
    pool = KVPool(SPEC, 8, SIZE, torch.float32, open_device("cpu"))
    with pytest.raises(ConfigError, match="set no batch_invariant"):
        make_backend("auto", SPEC, pool, batch_invariant=True)

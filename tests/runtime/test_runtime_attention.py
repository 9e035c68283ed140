"""The contract of an attention backend, for every registered one, against dense attention."""

import numpy as np
import pytest
import torch

from mmengine.errors import ConfigError
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.registry import BACKENDS, make_backend
from mmengine.runtime.kv import KVPool, blocks_for_memory, bytes_per_block

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def spec_of(heads: int, kv_heads: int, head_dim: int, layers: int = 2) -> ModelSpec:
    return ModelSpec(layers, heads, kv_heads, head_dim, heads * head_dim, 64, 4096, 0, 8)


def dense(q, k, v):
    """fp32 attention of the last len(q) tokens of one row; q [s, Hq, D], k and v [n, Hkv, D]."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    s, n = scores.shape[1:]
    visible = torch.arange(n)[None, :] <= torch.arange(n - s, n)[:, None]
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(0, 1)


class Rows:
    """Rows of random KV, fed to a backend in steps of given lengths, with random blocks."""

    def __init__(self, backend: str, spec: ModelSpec, dtype, block_size=4, num_blocks=96, seed=0):
        self.spec, self.dtype, self.block_size = spec, dtype, block_size
        self.random = np.random.default_rng(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        self.pool = KVPool(spec, num_blocks, block_size, dtype, torch.device("cpu"))
        self.backend = make_backend(backend, spec, self.pool)
        self.free = self.random.permutation(np.arange(1, num_blocks)).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.kv: dict[str, torch.Tensor] = {}  # [layers, 2, n, Hkv, D]

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.torch_random).to(self.dtype)

    def share(self, name: str, source: str, num_tokens: int) -> None:
        """`name` begins with the blocks of `source`: num_tokens is a multiple of the block size."""
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
        padded = np.array([blocks + [0] * (width - len(blocks)) for blocks in table])
        slots, lens = np.concatenate(slots), np.array(lens, np.int32)
        fresh = slots[slots % self.block_size == 0] // self.block_size
        if self.backend.reads_unwritten:
            self.pool.clear(torch.from_numpy(fresh))
        counts = np.array([count for _, count in work], np.int32)
        wider = np.concatenate((padded, self.random.integers(0, self.pool.num_blocks, padded.shape)), axis=1)
        table = wider.astype(np.int32)[:, :width]  # rows lie further apart than they are wide
        self.backend.begin(AttentionMeta(counts, lens, slots, table))
        self.check(work, torch.cat(queries, 1), torch.cat(fresh_kv, 2))

    def check(self, work, queries, new):
        for layer in range(self.spec.num_layers):
            self.backend.append(layer, new[layer, 0], new[layer, 1])
            out = self.backend.run(layer, queries[layer])
            assert out.shape == queries[layer].shape
            assert out.dtype == self.dtype
            start = 0
            for name, count in work:
                want = dense(queries[layer][start : start + count], *self.kv[name][layer])
                torch.testing.assert_close(
                    out[start : start + count].float(), want, atol=TOLERANCE[self.dtype], rtol=0.02
                )
                start += count


@pytest.fixture(params=sorted(BACKENDS))
def backend(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(4, 2, 32), (4, 4, 16), (8, 1, 64)])
def test_random_ragged_batches(backend, dtype, heads, kv_heads, head_dim):
    random = np.random.default_rng(heads)
    rows = Rows(backend, spec_of(heads, kv_heads, head_dim), dtype, num_blocks=400)
    names = [f"r{i}" for i in range(8)]
    for _ in range(12):
        some = random.permutation(names)[: random.integers(1, 9)]
        rows.step(*[(str(name), int(random.choice([1, 1, 2, 7, 13]))) for name in some])


def test_decode_rows_of_very_different_lengths(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("long", 97), ("short", 1), ("middle", 8))
    for _ in range(9):
        rows.step(("short", 1), ("long", 1), ("middle", 1))


def test_chunks_of_a_prompt_end_anywhere(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    for count in (3, 1, 4, 8, 2, 1, 9):
        rows.step(("a", count), ("b", 1))


def test_equal_chunks_at_equal_and_other_offsets(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("a", 5), ("b", 5), ("c", 9))
    rows.step(("a", 6), ("c", 6), ("b", 6))
    rows.step(("d", 6), ("a", 6), ("e", 6))


def test_a_prefix_filled_in_the_same_step(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("first", 8))
    # `first` fills its third block; in the same step `second` reads its first two.
    rows.share("second", "first", 8)
    rows.step(("second", 5), ("first", 4))
    rows.share("third", "first", 12)
    rows.step(("third", 1), ("first", 1), ("second", 1))


def test_blocks_written_by_another_row_of_the_step_are_read(backend):
    """A row whose cached tokens another row computes now: all rows are appended before any is run."""
    spec, size = spec_of(2, 1, 8, layers=1), 4
    pool = KVPool(spec, 8, size, torch.float32, torch.device("cpu"))
    attention = make_backend(backend, spec, pool)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 5, 1, 8, generator=generator)
    q = torch.randn(5, 2, 8, generator=generator)
    # Row 0 is token 4 behind block 3, row 1 computes block 3 in this very step.
    table = np.array([[3, 5], [3, 0]], np.int32)
    lens = np.array([5, 4], np.int32)
    attention.begin(AttentionMeta(np.array([1, 4], np.int32), lens, np.array([20, 12, 13, 14, 15]), table))
    attention.append(0, k, v)
    out = attention.run(0, q)
    order = [1, 2, 3, 4, 0]
    torch.testing.assert_close(out[:1], dense(q[:1], k[order], v[order]))
    torch.testing.assert_close(out[1:], dense(q[1:], k[1:], v[1:]))


def test_a_reused_block_keeps_nothing_of_a_row_that_went_wrong(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32, num_blocks=12)
    rows.step(("bad", 8))
    rows.pool.blocks[:, rows.blocks["bad"]] = float("nan")
    rows.free.extend(rows.blocks.pop("bad"))
    rows.step(("a", 5), ("b", 1))
    rows.step(("a", 1), ("b", 3))


def test_one_row_that_is_nan_leaves_the_others_alone(backend):
    spec = spec_of(4, 2, 32, layers=1)
    pool = KVPool(spec, 8, 4, torch.float32, torch.device("cpu"))
    attention = make_backend(backend, spec, pool)
    generator = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 3, 2, 32, generator=generator)
    q = torch.randn(3, 4, 32, generator=generator)
    k[1] = v[1] = q[1] = float("nan")
    ones = np.ones(3, np.int32)
    table = np.array([[1], [2], [3]], np.int32)
    attention.begin(AttentionMeta(ones, ones, np.array([4, 8, 12]), table))
    attention.append(0, k, v)
    out = attention.run(0, q)
    for row in (0, 2):
        torch.testing.assert_close(
            out[row : row + 1], dense(q[row : row + 1], k[row : row + 1], v[row : row + 1])
        )
    assert out[1].isnan().all()


def test_the_dummy_block_is_never_written(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("a", 7), ("b", 30))
    rows.step(("a", 1), ("b", 1))
    assert not rows.pool.blocks[:, 0].any()


def test_fused_projections_need_not_be_contiguous(backend):
    spec = spec_of(4, 2, 32, layers=1)
    pool = KVPool(spec, 4, 4, torch.float32, torch.device("cpu"))
    attention = make_backend(backend, spec, pool)
    fused = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(3))
    q, k, v = fused.split((4, 2, 2), dim=1)
    three = np.array([3], np.int32)
    attention.begin(AttentionMeta(three, three, np.array([8, 9, 10]), np.array([[2]], np.int32)))
    attention.append(0, k, v)
    torch.testing.assert_close(attention.run(0, q), dense(q, k, v))


def test_unknown_backend_is_named_with_the_known_ones():
    spec = spec_of(4, 2, 32)
    pool = KVPool(spec, 4, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="'flash'.*auto, native, torch"):
        make_backend("flash", spec, pool)
    assert isinstance(make_backend("auto", spec, pool), tuple(BACKENDS.values()))


def test_blocks_for_memory():
    spec = spec_of(4, 2, 32, layers=3)
    assert bytes_per_block(spec, torch.bfloat16, 16) == 3 * 2 * 16 * 2 * 32 * 2
    assert blocks_for_memory(spec, torch.bfloat16, 16, 12288 * 7 + 12287) == 7
    assert blocks_for_memory(spec, torch.float32, 16, 12288 * 4) == 2
    with pytest.raises(ConfigError, match="hold no KV cache"):
        blocks_for_memory(spec, torch.float32, 16, 12288 * 4 - 1)
    with pytest.raises(ConfigError, match="num_blocks must be at least 2"):
        KVPool(spec, 1, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="lower num_blocks"):
        KVPool(spec, 2**40, 16, torch.float32, torch.device("cpu"))

"""Tests that draft chains (consecutive draft passes) give the same drafts and KV with and without captured
graphs. No GPU is used: a replay calls the captured Python function again, on the graph's buffers.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repeater import Repeater

from mmengine.core.executor import NO_DRAFT
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.attention.triton_paged import TritonPagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.drafting.head.chain import draft
from mmengine.runtime.drafting.head.chain_rows import ChainRows
from mmengine.runtime.drafting.head.graphs import ChainGraphs
from mmengine.runtime.drafting.head.network import kv_spec
from mmengine.runtime.graphs import capture
from mmengine.runtime.graphs.buckets import row_sizes
from mmengine.runtime.kv.pool import KVPool
from tests.spec_decode.eagle3_heads import FAMILIES, TARGET
from tests.spec_decode.eagle3_passes import load, sequences

SIZE, MOST_ROWS, MOST = 4, 6, 9  # block size, rows, drafts per row
WIDTH = 8  # blocks per row
CPU = torch.device("cpu")


class Side:
    """A draft head with its own KV pool. With a `recorder`, the head's passes are captured and replayed."""

    def __init__(self, head, recorder=None, backend=TorchPagedAttention):
        self.head, spec = head, kv_spec(head.config)
        self.pool = KVPool(spec, 1 + MOST_ROWS * WIDTH, SIZE, head.dtype, CpuDevice())
        self.attention = backend(spec, self.pool)
        self.table = np.random.default_rng(0).permutation(np.arange(1, 1 + MOST_ROWS * WIDTH))
        self.table = self.table.astype(np.int32).reshape(MOST_ROWS, WIDTH)
        with torch.inference_mode():
            self.graphs = None
            if recorder is not None:
                self.graphs = ChainGraphs(
                    head, self.attention, recorder, block_size=SIZE, max_rows=MOST_ROWS, most=MOST
                )

    @torch.inference_mode()
    def read(self, rows):
        """Run the head's forward pass over `rows`. Return `z` and `carry` (see HeadNetwork) for each row's
        last token.
        """
        counts = np.array([len(tokens) for _, tokens, _ in rows], np.int32)
        index = [np.arange(count) for count in counts]
        slots = [self.table[row, at // SIZE] * SIZE + at % SIZE for row, at in enumerate(index)]
        table = self.table[: len(rows)]
        self.attention.begin(AttentionMeta(counts, counts, np.concatenate(slots).astype(np.int64), table))
        aux_hidden_states, tokens, positions = zip(*rows, strict=True)
        z, carry = self.head.forward(
            self.head.fuse(torch.cat(aux_hidden_states)),
            self.head.embed(torch.cat(tokens)),
            torch.cat(positions, 1),
            self.attention,
            0,
        )
        last = torch.from_numpy(np.cumsum(counts) - 1)
        return z[last], carry[last]

    @torch.inference_mode()
    def draft(self, rows, z, carry, most, given=None):
        lens = np.array([len(tokens) for _, tokens, _ in rows], np.int32)
        places = np.array([int(positions[0, -1]) + 1 for _, _, positions in rows], np.int32)
        chain = ChainRows(most, lens, places, self.table[: len(rows)], given)
        return draft(self.head, z, carry, chain, self.attention, 0, SIZE, self.graphs)


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Return (side with captured graphs, side without graphs) by head family, with the same head."""
    made = {}
    for family, write in FAMILIES.items():
        head = load(write(), tmp_path_factory.mktemp(family))
        made[family] = Side(head, Repeater()), Side(head)
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.tuples(st.integers(1, 14), st.integers(0, MOST), st.integers(0, 3)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 99),
)
def test_drafts_equal_launched_passes(sides, family, shapes, is_alike, seed):
    """Consecutive chains use the same buffers. Some rows already have drafts from other drafters."""
    lengths, most, before = (np.array(each, np.int32) for each in zip(*shapes, strict=True))
    most[:] = most[0] if is_alike else most
    given = np.full((len(most), MOST), NO_DRAFT, np.int64)
    tokens = np.random.default_rng(seed).integers(0, TARGET.vocab_size, given.shape)
    there = np.arange(MOST) < before[:, None]
    given[there] = tokens[there]
    given = given if before.any() else None
    found = []
    for side in sides[family]:
        side.pool.blocks.zero_()
        rows = sequences(side.head, seed, lengths.tolist())
        drafts = side.draft(rows, *side.read(rows), most, given)
        found.append((drafts, side.pool.blocks[:, 1:].clone()))
    (drafts, blocks), (wanted, wanted_blocks) = found
    assert drafts.tolist() == wanted.tolist() and drafts.shape == (len(most), most.max())
    torch.testing.assert_close(blocks, wanted_blocks, atol=1e-5, rtol=1e-5)


def test_drafts_where_our_kernels_attend(kernel_device, tmp_path):
    """The Triton backend's passes share a plan buffer, so each pass must write its plan before it runs."""
    if kernel_device.type != "cpu":
        pytest.skip("gpu.sh compares chains on a GPU")
    head = load(FAMILIES["specforge"](), tmp_path)
    sides = Side(head, Repeater(), TritonPagedAttention), Side(head)
    most = np.array([5, 2, 4], np.int32)
    for seed in (1, 2):
        rows = sequences(head, seed, (9, 3, 6))
        found, wanted = (side.draft(rows, *side.read(rows), most) for side in sides)
        assert found.tolist() == wanted.tolist()
    assert sides[0].graphs.num_chains == {"replayed": 2, "capture_failed": 0}


def test_each_pass_is_replayed_in_the_smallest_size_that_fits(sides):
    side = sides["specforge"][0]
    rows = sequences(side.head, 1, (3, 4, 5, 6, 7))
    before, widths = side.graphs.num_chains["replayed"], []
    side.attention.begin, begin = (
        lambda meta, bucket: widths.append(bucket) or begin(meta),
        side.attention.begin,
    )
    z, carry = torch.zeros(2, 5, side.head.config.hidden_size)
    drafts = side.draft(rows, z, carry, np.array([0, 3, 6, 3, 1], np.int32))
    side.attention.begin = begin
    assert [tuple(bucket) for bucket in widths] == [(4, 1), (4, 1), (1, 1), (1, 1), (1, 1)]
    assert ((drafts != NO_DRAFT).sum(1) == [0, 3, 6, 3, 1]).all()
    assert side.graphs.num_chains == {"replayed": before + 1, "capture_failed": 0}


def test_nan_drafts_are_tokens_and_stay_with_their_row(sides):
    """A row with NaN changes neither other rows' drafts nor the next chain's drafts."""
    replayed, launched = sides["specforge"]
    rows = sequences(replayed.head, 2, (3, 9, 5))
    for side in (replayed, launched):
        side.pool.blocks.zero_()
    z, carry = replayed.read(rows)
    launched.read(rows)
    for broken in (True, False):
        given = (z.clone(), carry.clone())
        for one in given:
            one[0] *= torch.nan if broken else 1
        most = np.array([2, 6, 6], np.int32)
        found, wanted = (side.draft(rows, *given, most) for side in (replayed, launched))
        assert found[1:].tolist() == wanted[1:].tolist()
        assert ((found >= 0) & (found < TARGET.vocab_size) | (found == NO_DRAFT)).all()


def test_a_capture_that_fails_leaves_chains_to_be_launched(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(capture.log, "warning", lambda what, **facts: told.append((what, facts)))

    class Failing(Repeater):
        def record(self, compute):
            if self.recorded == len(row_sizes(MOST_ROWS)) + 1:
                raise RuntimeError("CUDA error: operation not permitted")
            return super().record(compute)

    head, recorder = load(FAMILIES["qwen3"](), tmp_path), Failing()
    failed, plain = Side(head, recorder), Side(head)
    rows = sequences(head, 3, (5, 2))
    found, wanted = (
        side.draft(rows, *side.read(rows), np.array([4, 2], np.int32)) for side in (failed, plain)
    )
    assert found.tolist() == wanted.tolist() and not recorder.replayed
    ((what, facts),) = told
    assert "a head's passes cannot be" in what and "num_rows=4" in facts["size"]
    assert failed.graphs.num_chains == {"replayed": 0, "capture_failed": 1}

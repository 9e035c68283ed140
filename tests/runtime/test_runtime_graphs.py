"""Tests of decode graphs: the choice of a bucket (a batch shape), its padding, and the tokens.

Tokens must equal the tokens without graphs. No GPU is used: a replay calls the captured Python function
again, over the same buffers, like a CUDA graph.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repeater import Repeater, let_backends_capture
from runtime_toy import EOS, Driver, ToyModel, positions_of, toy_request

from mmengine.config import EngineConfig
from mmengine.core.executor import MediaSpan, StepPlan
from mmengine.models.plugin import AuxHiddenStates
from mmengine.request import SamplingParams
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.graphs import capture
from mmengine.runtime.graphs.buckets import (
    MEDIA,
    PROMPT,
    all_buckets,
    empty_step,
    fill_up,
    frame_of,
    row_sizes,
)
from mmengine.runtime.graphs.decode import DecodeGraphs
from mmengine.runtime.kv.pool import KVPool

SIZE = 4


def plan_of(counts, media=()):
    counts = np.array(counts, np.int32)
    rows, total = len(counts), int(counts.sum())
    return StepPlan(
        1,
        np.arange(rows, dtype=np.int32),
        counts,
        np.full(rows, 3, np.int32),
        np.zeros(total, np.int32),
        np.zeros(total, np.int32),
        np.zeros(total, np.int64),
        np.zeros((rows, 1), np.int32),
        np.arange(rows, dtype=np.int32),
        media=media,
    )


def test_sizes_end_with_the_most_rows():
    assert row_sizes(1) == (1,)
    assert row_sizes(5) == (1, 2, 4, 5)
    assert row_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert row_sizes(300)[-4:] == (256, 272, 288, 300)
    for rows in range(1, 600):
        sizes = row_sizes(rows)
        assert sizes[-1] == rows and sorted(set(sizes)) == list(sizes)


def test_the_first_bucket_fits_every_other_bucket():
    # The largest bucket is captured first, so that all others fit into its memory.
    first, *others = all_buckets(24, 3)
    assert first == Bucket(24, 4)
    assert all(one.num_rows <= first.num_rows and one.num_tokens <= first.num_tokens for one in others)
    assert len(others) + 1 == 2 * len(row_sizes(24)) and len(all_buckets(24, 0)) == len(row_sizes(24))


@pytest.mark.parametrize(
    "counts, drafts, bucket",
    [
        ([1], 0, Bucket(1, 1)),
        ([1] * 3, 0, Bucket(4, 1)),
        ([1] * 9, 4, Bucket(16, 1)),
        ([1, 2, 1], 4, Bucket(4, 5)),
        ([5], 4, Bucket(1, 5)),
        ([6], 4, PROMPT),
        ([1, 2], 0, PROMPT),
    ],
)
def test_the_bucket_of_a_step(counts, drafts, bucket):
    found = frame_of(plan_of(counts), row_sizes(20), drafts)
    assert found == bucket if isinstance(bucket, str) else found.bucket == bucket


def test_a_step_with_features_is_launched_anew():
    # A step with image features uses no graph; `frame_of` returns the reason.
    span = MediaSpan(b"k", 0, 0, 1)
    assert frame_of(plan_of([1], (span,)), (1, 2), 0) == MEDIA


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=9), st.integers(0, 9))
def test_padding_touches_no_request_blocks(rows, seed):
    """Real tokens keep their slots and see the same KV as without padding.

    Padding is stored in the dummy block.
    """
    random = np.random.default_rng(seed)
    counts = np.array([count for _, count in rows], np.int32)
    lens = np.array([before + count for before, count in rows], np.int32)
    table = random.integers(1, 90, (len(rows), 8)).astype(np.int32)
    index = [np.arange(before, before + count) for before, count in rows]
    slots = np.concatenate([table[row][i // SIZE] * SIZE + i % SIZE for row, i in enumerate(index)])
    frame = frame_of(plan_of(counts), row_sizes(16), 3)
    meta = fill_up(AttentionMeta(counts, lens, slots.astype(np.int64), table), frame, SIZE)
    bucket = frame.bucket
    assert meta.query_lens.tolist() == [bucket.query_len] * bucket.num_rows
    assert len(meta.slots) == bucket.num_tokens and len(meta.table) == bucket.num_rows
    places = np.arange(bucket.num_tokens)[frame.places]
    assert len(set(places.tolist())) == len(slots) and meta.slots[places].tolist() == slots.tolist()
    others = np.delete(meta.slots, places)
    assert ((others >= 0) & (others < SIZE)).all()
    starts = np.cumsum(counts) - counts
    for row, (_, count) in enumerate(rows):
        own = places[starts[row] : starts[row] + count]
        # Query i of a row in the bucket sees kv_len - query_len + i + 1 tokens.
        seen = meta.kv_lens[row] - bucket.query_len + own % bucket.query_len + 1
        assert (own // bucket.query_len == row).all() and seen.tolist() == (index[row] + 1).tolist()
        blocks = -(-lens[row] // SIZE)
        assert meta.table[row, :blocks].tolist() == table[row, :blocks].tolist()
        assert (meta.table[row, blocks:] == table[row, 0]).all(), "no block of another row is read"
    assert (meta.kv_lens[len(rows) :] == bucket.query_len).all() and not meta.table[len(rows) :].any()
    assert meta.table.shape[1] * SIZE >= meta.kv_lens.max()


def test_an_empty_step_is_all_dummy():
    meta = empty_step(Bucket(3, 2), SIZE)
    assert meta.kv_lens.tolist() == [2, 2, 2] and not meta.table.any() and (meta.slots < SIZE).all()


@pytest.fixture
def capturable(monkeypatch):
    let_backends_capture(monkeypatch.setattr)


def make(recorder, attention="torch", **settings):
    sizes = {"max_num_seqs": 6, "num_blocks": 64, "block_size": SIZE, "encoder_cache_size": 64}
    config = EngineConfig(**{**sizes, "eos_token_ids": (EOS,), **settings})
    model = ToyModel()
    placement = Placement(CpuDevice(), torch.float32, attention)
    return Driver(TorchExecutor(model, positions_of, config, placement, recorder=recorder), config)


def run(recorder):
    """Run prompts, chunks, an image, sampling, penalties and a preemption, with different rows in different
    steps.
    """
    driver = make(recorder)
    sampled = SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
    penalised = SamplingParams(repetition_penalty=1.3, ignore_eos=True)
    for name, seed, options in (("a", 1, None), ("b", 2, sampled), ("c", 3, penalised)):
        driver.add(*toy_request(name, seed, 9 + seed, sampling=options))
    driver.add(*toy_request("d", 4, media_runs=[[(2, 4)]]))
    driver.step(("a", None), ("b", None))
    for _ in range(5):
        driver.step(("a", None), ("b", None))
    driver.step(("c", 5), ("a", None))
    driver.step(("a", None), ("c", None), ("d", None))
    for _ in range(4):
        driver.step(("d", None), ("c", None), ("b", None))
    driver.preempt("c")
    driver.step(("b", None), ("c", None))
    for _ in range(3):
        driver.step(("b", None), ("c", None), ("a", None), ("d", None))
    return driver


def test_tokens_equal_freshly_launched_steps(capturable):
    recorder = Repeater()
    replayed, anew = run(recorder), run(None)
    for name in "abcd":
        assert replayed.outputs(name) == anew.outputs(name)
        assert len(set(anew.outputs(name))) > 2
    assert recorder.recorded == len(row_sizes(6))
    counted = {"replayed": recorder.replayed, "media": 1, "prompt": 3, "adapters": 0, "capture_failed": 0}
    assert replayed.executor.graph_counts == {"steps": counted}
    assert recorder.replayed == 12 and anew.executor.graph_counts == {}


def test_a_backend_that_cannot_be_captured_is_not():
    recorder = Repeater()
    assert run(recorder).executor.graph_counts == {} and recorder.recorded == 0


def test_a_failed_capture_is_reported_once_and_steps_are_launched(capturable, monkeypatch):
    told = []
    monkeypatch.setattr(capture.log, "warning", lambda what, **facts: told.append((what, facts)))

    class Failing(Repeater):
        def record(self, compute):
            if self.recorded == 2:
                raise RuntimeError(
                    "CUDA error: operation not permitted when stream is capturing\nlong advice"
                )
            return super().record(compute)

    recorder = Failing()
    driver = run(recorder)
    assert driver.outputs("a") == run(None).outputs("a") and recorder.replayed == 0
    ((what, facts),) = told
    assert "kernel by kernel" in what and "set cuda_graphs false" in what
    assert "num_rows=2" in facts["size"] and facts["reason"].endswith("when stream is capturing")
    counted = driver.executor.graph_counts["steps"]
    assert counted["capture_failed"] == 16 and not counted["replayed"]


def test_a_nan_row_does_not_spoil_the_dummy_block(capturable):
    """The NaN row shares its bucket with a padding row, which reads the dummy block."""
    driver = make(Repeater())
    requests = [toy_request(f"r{i}", i, num_text=5 + i) for i in range(3)]
    for request, media in requests:
        driver.add(request, media)
    driver.step(*[(request.request_id, None) for request, _ in requests])
    fresh = make(None)
    for request, media in requests:
        fresh.add(request, media)
    fresh.step(*[(request.request_id, None) for request, _ in requests])
    broken = driver.known["r0"][-1]
    driver.executor._runner._model.poisoned = broken
    fresh.executor._runner._model.poisoned = broken
    for _ in range(3):
        driver.step(("r0", None), ("r1", None), ("r2", None))
        fresh.step(("r0", None), ("r1", None), ("r2", None))
    assert torch.isfinite(driver.executor._runner._kv.blocks[:, 0]).all()
    assert driver.outputs("r1") == fresh.outputs("r1") and driver.outputs("r2") == fresh.outputs("r2")


class WithAux:
    """A model whose auxiliary states contain each token's id and position."""

    def __init__(self):
        self.spec = ToyModel().spec

    def embed(self, input_ids):
        return input_ids.float()[:, None].expand(-1, self.spec.hidden_size).clone()

    def forward(self, embeds, deepstack, positions, attention, aux_hidden_states=None):
        aux_hidden_states.rows.copy_(embeds[:, :2] * 100 + positions[:2].T)
        return embeds


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 3, 1]])
def test_a_head_gets_copies_of_the_steps_own_tokens(counts):
    """The head may read a step's states after the next replay, so a replay must not overwrite the states."""
    spec = ToyModel().spec
    kv = KVPool(spec, 8, SIZE, torch.float32, CpuDevice())
    graphs = DecodeGraphs(
        WithAux(),
        TorchPagedAttention(spec, kv),
        Repeater(),
        torch.device("cpu"),
        torch.float32,
        block_size=SIZE,
        max_rows=4,
        num_drafts=2,
        aux_hidden_states=AuxHiddenStates((0,), torch.empty(1, 2)),
    )
    total, given = sum(counts), []
    for first in (1, 50):
        plan = plan_of(counts)
        frame = graphs.frame(plan)
        number = frame.bucket.num_tokens
        packed = torch.zeros(4, number, dtype=torch.int64)
        packed[0, frame.places] = torch.arange(first, first + total)
        packed[1:, frame.places] = torch.arange(first, first + total) + 7
        graphs.inputs[: 4 * number] = packed.view(-1)
        lens = plan.num_computed + plan.num_scheduled
        graphs.run(frame, AttentionMeta(plan.num_scheduled, lens, plan.slot_mapping, plan.block_table))
        aux_hidden_states = AuxHiddenStates((0,), torch.empty(total, 2))
        given.append(
            (
                aux_hidden_states,
                graphs.copy_aux_states(
                    frame, aux_hidden_states, graphs.inputs[number : 4 * number].view(3, number)
                ),
            )
        )
    for first, (aux_hidden_states, positions) in zip((1, 50), given):
        tokens = torch.arange(first, first + total)
        assert positions.tolist() == [(tokens + 7).tolist()] * 3
        assert (
            aux_hidden_states.rows.tolist()
            == (tokens * 100 + tokens + 7).float()[:, None].expand(-1, 2).tolist()
        )

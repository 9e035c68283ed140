"""Tests that penalties count the drafts before a position as if they had been sampled."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.core.executor import Admission
from mmengine.request import Request, SamplingParams
from mmengine.runtime.rows import PENALTIES, RowColumns
from mmengine.runtime.sampling.runs import NOTHING, Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler

VOCAB, ROWS = 12, 5


def runs_of(drafts):
    sizes = np.array([len(each) + 1 for each in drafts])
    follows = np.concatenate([[*each, NOTHING] for each in drafts]).astype(np.int32)
    row_of = np.repeat(np.arange(len(sizes)), sizes)
    return Runs(np.arange(sizes.sum()), np.cumsum(sizes) - sizes, row_of, follows)


class Bench:
    """A sampler with ROWS rows that have known tokens. The rows with `is_penalised` True have penalties."""

    def __init__(self, known, is_penalised):
        self.columns = RowColumns(ROWS, VOCAB, (), lambda ids, _: (np.zeros((3, len(ids)), np.int32), 0))
        self.sampler = Sampler(self.columns, ROWS, VOCAB, torch.device("cpu"))
        for row, (tokens, some) in enumerate(zip(known, is_penalised)):
            how = (
                {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4}
                if some
                else {}
            )
            tokens = np.array(tokens, np.int32)
            admission = Admission(row, Request(f"{row}", tokens[:2], SamplingParams(**how)), tokens)
            self.columns.admit(admission)
            self.sampler.admit(admission)

    def batch(self, rows, runs):
        depths = np.arange(len(runs.places)) - runs.first[runs.row_of]
        known = np.array([2] * ROWS)
        return SampleRows.of(self.columns, rows[runs.row_of], known[rows[runs.row_of]] + depths, runs)


tokens = st.integers(0, VOCAB - 1)
benches = st.tuples(
    st.lists(st.lists(tokens, min_size=2, max_size=9), min_size=ROWS, max_size=ROWS),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    st.lists(st.lists(tokens, max_size=5), min_size=1, max_size=ROWS),
    st.randoms(use_true_random=False),
)


@settings(max_examples=100, deadline=None)
@given(benches)
def test_penalties_in_runs_equal_single_tokens(case):
    known, is_penalised, drafts, source = case
    rows = np.array(source.sample(range(ROWS), len(drafts)))
    runs = runs_of(drafts)
    at_once, by_one = Bench(known, is_penalised), Bench(known, is_penalised)
    logits = torch.from_numpy(
        np.random.default_rng(source.randrange(2**30))
        .normal(0, 3, (len(runs.places), VOCAB))
        .astype(np.float32)
    )
    batch = at_once.batch(rows, runs)
    found = at_once.sampler.choose(logits.clone(), batch).token_ids.tolist()
    want = []
    for place, row in enumerate(rows.tolist()):
        for depth in range(len(drafts[place]) + 1):
            at = int(runs.first[place]) + depth
            single = SampleRows.of(by_one.columns, np.array([row]), np.array([2 + depth]))
            want.append(int(by_one.sampler.choose(logits[at : at + 1].clone(), single).token_ids[0]))
            if depth < len(drafts[place]):
                by_one.sampler.count(single, torch.tensor([drafts[place][depth]]))
    assert found == want
    _compare_logits(at_once, batch, runs, rows, drafts, logits, known, is_penalised)


def _compare_logits(bench, batch, runs, rows, drafts, logits, known, is_penalised):
    """Compare the penalised logits with penalties that are computed from plain lists of tokens."""
    adjusted = logits.clone()
    if not batch.wanted & PENALTIES:
        assert batch.drafted is None
        return
    bench.sampler._adjust(adjusted, batch.columns["options"], batch)
    for place, row in enumerate(rows.tolist()):
        for depth in range(len(drafts[place]) + 1):
            at = int(runs.first[place]) + depth
            if not is_penalised[row]:
                assert torch.equal(adjusted[at], logits[at])
                continue
            ahead = drafts[place][:depth]
            said, seen = [*known[row][2:], *ahead], {*known[row], *ahead}
            for token in range(VOCAB):
                value = float(logits[at, token])
                if token in seen:
                    value = value / 1.3 if value > 0 else value * 1.3
                value -= said.count(token) * -0.4 + (token in said) * 0.7
                assert abs(float(adjusted[at, token]) - value) < 1e-4


@settings(max_examples=100, deadline=None)
@given(benches, st.data())
def test_selected_positions_keep_their_drafts_before(case, data):
    # `take` selects positions. The drafts before a selected position still count for its penalties.
    known, is_penalised, drafts, source = case
    rows = np.array(source.sample(range(ROWS), len(drafts)))
    runs = runs_of(drafts)
    batch = Bench(known, is_penalised).batch(rows, runs)
    size = len(runs.places)
    selected = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1)))), np.intp)
    some = batch.take(selected)
    assert some.rows.tolist() == batch.rows[selected].tolist()
    assert some.output_index.tolist() == batch.output_index[selected].tolist()
    assert some.in_runs
    want = {}
    for index, at in enumerate(selected.tolist()):
        place = int(runs.row_of[at])
        row = int(rows[place])
        if is_penalised[row]:
            for token in drafts[place][: at - int(runs.first[place])]:
                want[index, token, row] = want.get((index, token, row), 0) + 1
    found = {}
    if some.drafted is not None:
        index, token, count = (each.tolist() for each in some.drafted.pairs)
        found = dict(zip(zip(index, token, some.drafted.rows.tolist()), count))
        assert len(found) == len(index)
    assert found == want

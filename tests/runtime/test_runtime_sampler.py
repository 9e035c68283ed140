"""Tests of the sampler: against a plain reference for one row, transformers' processors, and a
chi-square test.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmengine.core.executor import ERROR_TOKEN, Admission
from mmengine.request import Request, SamplingParams
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.filters import apply_temperature, keep_min_p, keep_top
from mmengine.runtime.sampling.gumbel import gumbel_noise
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler
from mmengine.runtime.sampling.topk import topk_tokens_of

CPU = torch.device("cpu")
EOS = 3
LIKELY = [-math.inf, -2.5, -1e-30, 0.0, 1e-30, 7.25]


def no_positions(prompt_token_ids, media):
    return np.zeros((3, len(prompt_token_ids)), np.int32), 0


class Bench:
    """A sampler with admitted rows. `rows`: (sampling, prompt, outputs, sample_index) for each row number."""

    def __init__(self, vocab_size, rows, max_rows=40):
        self.vocab_size, self.rows = vocab_size, rows
        self.columns = RowColumns(max_rows, vocab_size, (EOS,), no_positions)
        self.sampler = Sampler(self.columns, max_rows, vocab_size, CPU)
        for row, spec in rows.items():
            self.admit(row, *spec)

    def admit(self, row, sampling, prompt=(1, 2), outputs=(), sample_index=0):
        self.rows[row] = (sampling, prompt, outputs, sample_index)
        request = Request(f"r{row}", np.array(prompt, np.int32), sampling, sample_index=sample_index)
        admission = Admission(row, request, np.array([*prompt, *outputs], np.int32))
        self.columns.admit(admission)
        self.sampler.admit(admission)

    def sample(self, logits, rows=None, output_index=None):
        rows = np.array(list(self.rows) if rows is None else rows)
        if output_index is None:
            output_index = [len(self.rows[row][2]) for row in rows.tolist()]
        output_index = np.array(output_index, np.int32)
        batch = SampleRows.of(self.columns, rows, output_index + self.columns.columns["num_prompt"][rows])
        before = logits.clone()
        sampled = self.sampler.sample(logits, batch)
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), (
            "the sampler must not change the caller's logits"
        )
        return sampled

    def tokens(self, logits, rows=None, output_index=None):
        return self.sample(logits, rows, output_index).token_ids.tolist()


def reference_scores(logits, sampling, prompt, outputs):
    """Return the scores from which a row's token is sampled, as floats: log-probabilities plus a constant,
    and -inf for excluded tokens.
    """
    scores = [float(x) for x in logits]
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in range(len(scores)):
        if token in prompt or token in outputs:
            scores[token] *= (
                1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
            )
        count = list(outputs).count(token)
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    if len(outputs) < sampling.min_tokens:
        for token in [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])]:
            scores[token] = -math.inf
    if sampling.temperature == 0:
        return scores
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    scores = [score / sampling.temperature for score in scores]
    kept = order[: sampling.top_k or len(order)]
    weights = {token: math.exp(scores[token] - scores[order[0]]) for token in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for token in kept:
        if mass / total < sampling.top_p:
            nucleus.append(token)
        mass += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= sampling.min_p]
    return [score if token in nucleus else -math.inf for token, score in enumerate(scores)]


def reference_token(logits, sampling, prompt, outputs, sample_index):
    scores = reference_scores(logits, sampling, prompt, outputs)
    if sampling.temperature > 0:
        noise = gumbel_noise(
            np.array([sampling.seed]), np.array([sample_index]), np.array([len(outputs)]), len(scores), CPU
        )[0]
        scores = [score + float(x) for score, x in zip(scores, noise)]
    return scores.index(max(scores))


def random_sampling(random, vocab_size):
    def maybe(value, off):
        return value if random.random() < 0.5 else off

    return SamplingParams(
        temperature=float(random.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=maybe(int(random.integers(1, vocab_size + 5)), 0),
        top_p=maybe(float(random.uniform(0.05, 1)), 1.0),
        min_p=maybe(float(random.uniform(0, 0.5)), 0.0),
        repetition_penalty=maybe(float(random.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        logit_bias=maybe(
            {int(token): float(random.uniform(-5, 5)) for token in random.integers(0, vocab_size, 4)}, {}
        ),
        min_tokens=maybe(int(random.integers(0, 6)), 0),
        stop_token_ids=maybe((5, 7), ()),
        ignore_eos=bool(random.random() < 0.3),
        seed=int(random.integers(0, 2**62)),
    )


@pytest.mark.parametrize("vocab_size", [17, 130])
def test_every_mixture_of_options_equals_the_plain_reference(vocab_size):
    random = np.random.default_rng(vocab_size)
    torch_random = torch.Generator().manual_seed(vocab_size)
    for _ in range(25):
        rows = {}
        for row in random.permutation(40)[:24].tolist():
            prompt = random.integers(0, vocab_size, 5).tolist()
            outputs = random.integers(0, vocab_size, random.integers(0, 8)).tolist()
            rows[row] = (random_sampling(random, vocab_size), prompt, outputs, int(random.integers(0, 3)))
        logits = torch.randn(24, vocab_size, generator=torch_random) * 3
        got = Bench(vocab_size, rows).tokens(logits)
        assert got == [reference_token(logits[n], *spec) for n, spec in enumerate(rows.values())]


def test_a_row_gets_the_same_token_in_any_batch():
    random = np.random.default_rng(5)
    logits = torch.randn(30, 257, generator=torch.Generator().manual_seed(5)) * 3
    rows = {row: (random_sampling(random, 257), (1, 2, 9), (4, 4), 0) for row in range(30)}
    together = Bench(257, dict(rows)).tokens(logits)
    for n in range(30):
        assert Bench(257, {39 - n: rows[n]}).tokens(logits[n : n + 1]) == together[n : n + 1]
    order = random.permutation(30)
    assert Bench(257, dict(rows)).tokens(logits[order], order) == [together[n] for n in order]


def test_filters_equal_transformers_processors():
    torch_random = torch.Generator().manual_seed(1)
    random = np.random.default_rng(1)
    for _ in range(20):
        scores = torch.randn(6, 97, generator=torch_random) * 4
        t, p, m = (
            float(random.uniform(0.2, 3)),
            float(random.uniform(0.1, 0.99)),
            float(random.uniform(0.01, 0.6)),
        )
        k = int(random.integers(1, 97))
        want = scores
        for warper in (
            TemperatureLogitsWarper(t),
            TopKLogitsWarper(k),
            TopPLogitsWarper(p),
            MinPLogitsWarper(m),
        ):
            want = warper(None, want)
        column = torch.ones(6, 1)
        got = apply_temperature(scores, column * t)
        got = keep_top(got, (column * k).long(), column * p, k)
        got = keep_min_p(got, column * m)
        assert torch.equal(got.isinf(), want.isinf())
        torch.testing.assert_close(got.softmax(-1), want.softmax(-1))


def test_a_nucleus_of_the_whole_vocabulary_keeps_every_tail():
    """A row with top_p 1 keeps all tokens, even if the likeliest token's probability rounds to 1. The other
    row, with top_p 0.5, keeps only the likeliest token.
    """
    logits = torch.full((2, 50), -20.0)
    logits[:, 7] = 0.0
    kept = keep_top(logits, torch.tensor([[50], [50]]), torch.tensor([[1.0], [0.5]]), 50)
    assert torch.equal(kept[0], logits[0])
    assert int(kept[1].isfinite().sum()) == 1


def test_equal_logits_are_kept_or_filtered_together():
    logits = torch.tensor([[2.0, 1.0, 2.0, 0.0, 2.0]])
    ones = torch.ones(1, 1)
    assert keep_top(logits, ones.long() * 2, ones, 2).isfinite().tolist() == [
        [True, False, True, False, True]
    ]
    nucleus = keep_top(logits, ones.long() * 5, ones * 0.1, 5)
    assert nucleus.isfinite().tolist() == [[True, False, True, False, True]]


def test_bias_and_repetition_equal_transformers_processors():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 3
    prompt, outputs = [4, 9, 9, 30], [1, 30, 7]
    bias = {2: 3.5, 9: -4.0, 30: 1.25}
    ids = torch.tensor([prompt + outputs] * 4)
    want = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(ids, logits)
    want = RepetitionPenaltyLogitsProcessor(1.7)(ids, want)
    for n in range(4):
        sampling = SamplingParams(repetition_penalty=1.7, logit_bias=bias, min_tokens=9)
        scores = torch.tensor(reference_scores(logits[n], sampling, prompt, outputs))
        expected = want[n].clone()
        expected[EOS] = -math.inf
        torch.testing.assert_close(scores, expected.to(scores.dtype), rtol=1e-5, atol=1e-5)
    rows = dict.fromkeys(range(4), (sampling, prompt, outputs, 0))
    want[:, EOS] = -math.inf
    assert Bench(50, rows).tokens(logits) == want.argmax(-1).tolist()


@pytest.mark.parametrize("among", ["alone", "with one that is random", "with penalties"])
def test_greedy_rows_give_their_next_best_token_before_min_tokens(among):
    """The three likeliest tokens are, in this order, the end-of-sequence token (EOS), token 4 and token 1."""
    early, late = (1, 2), [5] * 3
    rows = {
        0: (SamplingParams(min_tokens=3), early, [5] * 2, 0),
        1: (SamplingParams(min_tokens=3), early, late, 0),
        2: (SamplingParams(min_tokens=3, ignore_eos=True), early, [], 0),
        3: (SamplingParams(min_tokens=3, stop_token_ids=(4, 99)), early, [5], 0),
        4: (SamplingParams(), early, [], 0),
        5: (SamplingParams(min_tokens=1, ignore_eos=True, stop_token_ids=(EOS,)), early, [], 0),
    }
    if among == "with one that is random":
        rows[6] = (SamplingParams(temperature=1e-9, seed=0, min_tokens=2), early, [], 0)
    if among == "with penalties":
        rows[6] = (SamplingParams(presence_penalty=0.1, min_tokens=2), early, [], 0)
    bench = Bench(6, rows)
    logits = torch.tensor([[0.0, 3.0, 1.0, 9.0, 5.0, 2.0]]).repeat(len(rows), 1)
    assert bench.tokens(logits) == [4, EOS, EOS, 1, EOS, 4, 4][: len(rows)]


def test_penalties_follow_the_tokens_that_are_sampled():
    """Counts grow from step to step, and start again when another request takes the row."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 0.0]])
    frequency = SamplingParams(frequency_penalty=0.6)
    bench = Bench(5, {7: (frequency, (1,), (), 0)})
    outputs = []
    for _ in range(8):
        want = reference_token(logits[0], frequency, (1,), outputs, 0)
        outputs.append(bench.tokens(logits, output_index=[len(outputs)])[0])
        assert outputs[-1] == want
    assert set(outputs) > {0, 1}
    bench.admit(7, SamplingParams())
    assert bench.tokens(logits) == [0]
    bench.admit(7, frequency)
    assert bench.tokens(logits) == [0]
    bench.admit(7, frequency, (1,), (0, 0, 0, 0))
    assert bench.tokens(logits) == [1]


def test_many_penalised_rows_keep_apart():
    # The counts of 40 penalised rows are independent, and their table has grown to 64 rows.
    bench = Bench(6, {})
    for row in range(40):
        bench.admit(row, SamplingParams(presence_penalty=2.0), (1,), (row % 5,))
    logits = torch.zeros(40, 6)
    logits[:, :5] = 1.0
    assert bench.tokens(logits) == [1 if row % 5 == 0 else 0 for row in range(40)]
    assert len(bench.sampler._counts._counts) == 64


def test_penalty_memory_is_released():
    bench = Bench(6, {})
    for row in range(40):
        bench.admit(row, SamplingParams(presence_penalty=2.0), (1,), (0,))
        assert bench.tokens(torch.ones(1, 6), [row]) == [1]
        bench.admit(row, SamplingParams())
    assert len(bench.sampler._counts._counts) == 4


def test_errors_stay_in_their_row():
    logits = torch.randn(8, 20, generator=torch.Generator().manual_seed(4))
    bad = {1: math.nan, 3: math.inf, 6: math.nan}
    warm = SamplingParams(temperature=1.0, top_p=0.9, seed=1, repetition_penalty=1.2, logprobs=2)
    for sampling in (SamplingParams(), warm):
        bench = Bench(20, dict.fromkeys(range(8), (sampling,)))
        want = bench.tokens(logits)
        broken = logits.clone()
        for row, value in bad.items():
            broken[row, row] = value
        broken[4] = -math.inf
        bench = Bench(20, dict.fromkeys(range(8), (sampling,)))
        got = bench.tokens(broken)
        assert got == [ERROR_TOKEN if row in (1, 3, 4, 6) else want[row] for row in range(8)]


def test_a_lone_minus_infinity_only_excludes_its_token():
    logits = torch.zeros(1, 6)
    logits[0, 0] = -math.inf
    assert Bench(6, {0: (SamplingParams(),)}).tokens(logits) == [1]


def test_extreme_settings():
    logits = torch.tensor([[1e30, -1e30, 0.0, 5.0], [1.0, 1.0001, 0.5, 0.0]])
    coldest = SamplingParams(temperature=1e-38, seed=1)
    assert Bench(4, {0: (coldest,), 1: (coldest,)}).tokens(logits) == [0, 1]
    tiny = SamplingParams(temperature=1.0, top_p=1e-6, seed=1)
    assert Bench(4, {0: (tiny,), 1: (tiny,)}).tokens(logits) == [0, 1]
    sharp = SamplingParams(temperature=100.0, min_p=1.0, seed=1)
    assert Bench(4, {0: (sharp,), 1: (sharp,)}).tokens(logits) == [0, 1]
    outside = SamplingParams(
        logit_bias={10**6: 5.0, -3: 5.0, 2: 2.0}, min_tokens=4, stop_token_ids=(10**6, 2)
    )
    assert Bench(4, {0: (outside,), 1: (outside,)}).tokens(logits) == [0, 1]


def chi_square(counts, probabilities):
    """Return the chi-square statistic and the degrees of freedom.

    Tokens with fewer than 5 expected draws are merged.
    """
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    kept = expected > 0
    assert not observed[~kept].any(), "a token that was filtered out was drawn"
    observed, expected = observed[kept], expected[kept]
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("along", ["seed", "output", "sample"])
def test_the_sampled_distribution(options, along):
    """Sample 20,000 tokens with noise keys that differ only in `along`.

    The chi-square statistic must be below its mean plus six standard deviations.
    """
    n, vocab_size = 20000, 30
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(6)) * 2
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 0} | options)
    bench = Bench(vocab_size, {0: (sampling,)})
    columns = np.repeat(bench.columns.columns[:1], n)
    output_index = np.zeros(n, np.int32)
    if along == "output":
        output_index = np.arange(n, dtype=np.int32)
    else:
        columns["seed" if along == "seed" else "sample_index"] = np.arange(n)
    batch = SampleRows(np.zeros(n, np.int64), columns, output_index, int(columns["options"][0]))
    tokens = bench.sampler.sample(logits.expand(n, -1), batch).token_ids
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    scores = torch.tensor(reference_scores(logits[0], sampling, (1, 2), ()), dtype=torch.float64)
    statistic, freedom = chi_square(counts, scores.softmax(-1).numpy())
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from(LIKELY), min_size=9, max_size=9)))
def test_of_equally_likely_tokens_the_lowest_is_listed_first(rows):
    logprobs = torch.tensor([[0.5, *row] for row in rows] + [[float(place) for place in range(10)]])
    for most in (1, 4, 10):
        values, token_ids = topk_tokens_of(logprobs, most)
        for row, mine, ids in zip(logprobs.tolist(), values.tolist(), token_ids.tolist(), strict=True):
            assert ids == sorted(range(10), key=lambda token: (-row[token], token))[:most]
            assert mine == [row[token] for token in ids]

"""Tests that the C++ sampling kernel gives the same tokens as torch's filters and noise."""

import numpy as np
import pytest

from mmengine.native import library
from mmengine.request import SamplingParams
from mmengine.runtime.sampling import drawing
from mmengine.runtime.sampling.drawing_cpu import UNSURE, draw_on_cpu
from tests.runtime.sampling_bench import Bench, random_logits, random_sampling


@pytest.fixture(autouse=True)
def _kernels():
    if library.load() is None:
        pytest.skip(library.describe())


@pytest.mark.parametrize("vocab_size", [1, 5, 61, 64, 65, 1000, 1536, 20000])
def test_tokens_equal_the_steps(vocab_size, monkeypatch):
    # Without `draw_on_cpu`, torch's filters and noise choose the tokens.
    random = np.random.default_rng(vocab_size)
    for _ in range(2 if vocab_size > 10000 else 12):
        bench = Bench(vocab_size, [random_sampling(random, vocab_size) for _ in range(24)], random)
        logits = random_logits(random, 24, vocab_size)
        got = bench.tokens(logits)
        with monkeypatch.context() as patch:
            patch.setattr(drawing, "draw_on_cpu", lambda *args: None)
            assert got == bench.tokens(logits)


def test_rows_may_lie_apart_and_none_depends_on_the_others():
    # The logits are a strided view. Each row gets the same token in the batch and alone.
    random = np.random.default_rng(3)
    bench = Bench(700, [random_sampling(random, 700) for _ in range(16)], random)
    wide = random_logits(random, 16, 900)
    logits = wide[:, 100:800]
    whole = draw_on_cpu(logits, bench.batch.columns, bench.batch.output_index)
    one_by_one = [
        draw_on_cpu(
            logits[i : i + 1].clone(), bench.batch.columns[i : i + 1], bench.batch.output_index[i : i + 1]
        )[0]
        for i in range(16)
    ]
    assert whole.tolist() == one_by_one


def test_near_ties_are_left_to_the_caller(monkeypatch):
    """torch draws a row's token if two scores nearly tie. Such ties are rare, so the test marks every second
    row as UNSURE.
    """
    random = np.random.default_rng(4)
    bench = Bench(300, [SamplingParams(seed=n, temperature=1.0) for n in range(8)], random)
    logits = random_logits(random, 8, 300)
    want = bench.tokens(logits)
    native = draw_on_cpu

    def unsure(*args):
        tokens = native(*args)
        tokens[::2] = UNSURE
        return tokens

    monkeypatch.setattr(drawing, "draw_on_cpu", unsure)
    assert bench.tokens(logits) == want


def test_rows_that_are_not_finite_do_no_harm():
    random = np.random.default_rng(5)
    bench = Bench(100, [SamplingParams(seed=n, temperature=0.8, top_p=0.9) for n in range(4)], random)
    logits = random_logits(random, 4, 100)
    want = bench.tokens(logits)
    logits[0] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    assert bench.tokens(logits) == [-1, -1, -1, want[3]]

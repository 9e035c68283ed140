"""Tests masks in the sampler. For each sampling option, sampling with a mask equals sampling from logits with
-inf.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from mmengine.core.executor import ERROR_TOKEN, Admission
from mmengine.native import library
from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.masking import keep_allowed
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler
from mmengine.structured_output.rows.rows import Masks

VOCAB = 77  # not a multiple of 32
KINDS = {
    "greedy": {},
    "drawn": {"temperature": 1.5},
    "top k": {"temperature": 1.0, "top_k": 3},
    "top p": {"temperature": 0.7, "top_p": 0.8},
    "min p": {"temperature": 2.0, "min_p": 0.1},
    "biased": {"logit_bias": {5: 100.0, 6: -100.0}, "temperature": 1.0},
    "penalised": {"repetition_penalty": 3.0, "presence_penalty": 1.0, "frequency_penalty": -2.0},
    "likelihoods": {"logprobs": 4, "temperature": 1.0},
}


class Bench:
    def __init__(self, kinds):
        self.columns = RowColumns(
            len(kinds), VOCAB, (3,), lambda prompt, media: (np.zeros((3, len(prompt))), 0)
        )
        self.sampler = Sampler(self.columns, len(kinds), VOCAB, torch.device("cpu"))
        for row, kind in enumerate(kinds):
            request = Request(
                f"r{row}",
                np.array([1, 2, 5], np.int32),
                SamplingParams(seed=row, **KINDS[kind]),
                grammar=GrammarRequest("regex", "a"),
            )
            admission = Admission(row, request, request.prompt_token_ids)
            self.columns.admit(admission)
            self.sampler.admit(admission)
        self.rows = np.arange(len(kinds))

    def sample(self, logits, masks, index=0):
        known = self.columns.columns["num_prompt"][self.rows] + index
        return self.sampler.sample(logits.clone(), SampleRows.of(self.columns, self.rows, known), masks)


def packed(allowed):
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, 96 - VOCAB))), axis=1, bitorder="little")
    return bits.view(np.uint32)


def masks_of(rng, count, selected):
    allowed = rng.random((len(selected), VOCAB)) < rng.choice([0.03, 0.5, 0.97], (len(selected), 1))
    allowed[np.arange(len(selected)), rng.integers(VOCAB, size=len(selected))] = True
    everywhere = np.ones((count, VOCAB), bool)
    everywhere[selected] = allowed
    return Masks(selected, packed(allowed)), everywhere


@pytest.fixture(params=["kernels", "no kernels"])
def kernels(request, hidden_compiler, tmp_path):
    with hidden_compiler(tmp_path) if request.param == "no kernels" else nullcontext():
        yield


def test_sampling_equals_sampling_from_masked_logits(kernels):
    rng = np.random.default_rng(3)
    for turn in range(12):
        kinds = rng.permutation([*KINDS, *KINDS])
        masked, plain = Bench(kinds), Bench(kinds)
        selected = np.sort(rng.permutation(len(kinds))[: rng.integers(1, len(kinds) + 1)])
        masks, allowed = masks_of(rng, len(kinds), selected)
        logits = torch.from_numpy(rng.normal(0, 3, (len(kinds), VOCAB)).astype(np.float32))
        before = torch.where(torch.from_numpy(allowed), logits, float("-inf"))
        for index in range(3):
            one, other = masked.sample(logits, masks, index), plain.sample(before, None, index)
            assert one.token_ids.tolist() == other.token_ids.tolist(), (turn, index)
            assert allowed[np.arange(len(kinds)), one.token_ids.numpy()].all()


def test_likelihoods_stay_the_models(kernels):
    # Logprobs come from the logits before masking.
    bench = Bench(["likelihoods", "greedy", "likelihoods"])
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (3, VOCAB)).astype(np.float32))
    masks, _ = masks_of(np.random.default_rng(2), 3, np.array([0, 1]))
    found = bench.sample(logits, masks)
    own = logits.log_softmax(-1)
    assert torch.equal(found.logprobs.chosen, own[[0, 2], found.token_ids[[0, 2]]])
    assert torch.equal(found.logprobs.best, own[[0, 2]].topk(4).values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_allowed_or_finite_logits_gets_no_token(kind, kernels):
    """A row with a NaN logit gets no token either, whether or not the mask allows the token with NaN."""
    nan = float("nan")
    for logits, allowed in (
        ([0.0, 1.0], []),
        ([nan, 1.0], [1]),
        ([float("-inf"), 1.0], [0]),
        ([nan, 1.0], [0]),
    ):
        bench = Bench([kind, "greedy"])
        line = torch.full((VOCAB,), -1.0)
        line[:2] = torch.tensor(logits)
        mask = np.zeros((1, VOCAB), bool)
        mask[0, allowed] = True
        found = bench.sample(torch.stack([line, line.nan_to_num()]), Masks(np.array([0]), packed(mask)))
        assert found.token_ids.tolist() == [ERROR_TOKEN, 1]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000])
def test_the_kernel_equals_numpy(vocab):
    """The inputs have ties, strided rows, mask words that allow all or no tokens, and rows with
    `is_read` False.
    """
    if library.load() is None:
        pytest.skip("no kernels here")
    rng = np.random.default_rng(vocab)
    for _ in range(20):
        logits = rng.integers(-3, 4, (9, vocab + 5)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        selected = np.sort(rng.permutation(9)[: rng.integers(1, 10)])
        bits = rng.integers(0, 2**32, (len(selected), -(-vocab // 32)), np.uint32)
        bits = np.where(rng.random(bits.shape) < 0.4, np.uint32(rng.choice([0, 2**32 - 1])), bits)
        masks, is_read = Masks(selected, bits), rng.random(len(selected)) < 0.5
        there, here = torch.from_numpy(logits.copy()), torch.from_numpy(logits.copy())
        largest, tokens = keep_allowed(there[:, 2 : 2 + vocab], masks, is_read)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "load", lambda: None)
            wanted_largest, wanted = keep_allowed(here[:, 2 : 2 + vocab], masks, is_read)
        assert torch.equal(largest, wanted_largest) and torch.equal(tokens, wanted)
        unread = selected[~is_read]
        assert torch.equal(there[unread], torch.from_numpy(logits)[unread])
        here[unread] = there[unread]
        assert torch.equal(there, here)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_as_on_a_cpu():
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 3, (6, VOCAB)).astype(np.float32))
    masks, _ = masks_of(rng, 6, np.array([0, 2, 5]))
    there, here = logits.cuda(), logits.clone()
    found = keep_allowed(there, masks, np.ones(3, bool))
    wanted = keep_allowed(here, masks, np.ones(3, bool))
    assert torch.equal(there.cpu(), here)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))

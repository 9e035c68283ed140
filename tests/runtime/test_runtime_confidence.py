"""Tests that the weights of allowed tokens equal a softmax over these tokens, with and without the C++
kernel.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from mmengine.runtime.rows import CONFIDENCE, GRAMMAR
from mmengine.runtime.sampling.confidence import confidences_of, weigh_allowed
from mmengine.structured_output.rows.rows import Masks
from mmengine.token_confidence import NUM_LIKELY


@pytest.fixture(params=["kernels", "no kernels"])
def kernels(request, hidden_compiler, tmp_path):
    with hidden_compiler(tmp_path) if request.param == "no kernels" else nullcontext():
        yield


def masks_of(allowed, selected):
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return Masks(selected, np.packbits(padded, axis=1, bitorder="little").view(np.uint32))


def reference(logits, allowed):
    """Return logprobs over the allowed tokens, float64, and their entropies."""
    values = np.where(allowed, logits.astype(np.float64), -np.inf)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):
        return values, -np.nansum(np.exp(values) * values, axis=1)


@pytest.mark.parametrize("vocab", [3, 77, 5003])
def test_weights_equal_a_softmax_over_the_allowed_tokens(kernels, vocab):
    rng = np.random.default_rng(vocab)
    for turn in range(20):
        count = int(rng.integers(1, 7))
        selected = np.sort(rng.permutation(count + 2)[:count])
        logits = rng.normal(0, rng.choice([0.1, 3, 60]), (count + 2, vocab)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.02] = -np.inf
        if turn % 3 == 0:
            logits = logits.round() + 0.0  # rounding makes ties; adding 0.0 turns -0.0 into 0.0
        allowed = rng.random((count, vocab)) < rng.choice([0, 0.02, 0.5, 1], (count, 1))
        token_ids = np.zeros(count + 2, np.int64)
        for row, place in enumerate(selected):
            token = token_ids[place] = rng.integers(vocab)
            allowed[row, token] = True
            logits[place, token] = rng.normal()
        options = np.full(count + 2, GRAMMAR)
        options[selected] |= rng.choice([0, CONFIDENCE], count)
        given = torch.from_numpy(logits.copy())
        weights = weigh_allowed(given, masks_of(allowed, selected), options)
        assert np.array_equal(given.numpy(), logits)
        wanted = (options[selected] & CONFIDENCE) != 0
        if not wanted.any():
            assert weights is None
            continue
        found = confidences_of(weights, given, torch.from_numpy(token_ids))
        places, allowed = selected[wanted], allowed[wanted]
        logprobs, entropy = reference(logits[places], allowed)
        assert np.array_equal(found.indices, places)
        assert np.array_equal(found.num_allowed.numpy() == 1, allowed.sum(axis=1) == 1)
        chosen = logprobs[np.arange(len(places)), token_ids[places]]
        assert np.allclose(found.chosen.numpy(), chosen, atol=2e-5, rtol=1e-5)
        assert np.allclose(found.entropy.numpy(), entropy, atol=2e-5)
        for row in range(len(places)):
            tokens = np.flatnonzero(np.isfinite(logprobs[row]))
            order = tokens[np.lexsort((tokens, -logits[places[row]][tokens]))][:NUM_LIKELY]
            best, ids = found.best.numpy()[row], found.best_ids.numpy()[row]
            assert np.array_equal(ids[: len(order)], order)
            assert np.allclose(best[: len(order)], logprobs[row, order], atol=2e-5, rtol=1e-5)
            assert (best[len(order) :] == -np.inf).all()

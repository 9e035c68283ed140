"""Tests of the Gumbel noise: the generator's known results, independence of the batch, and the
distribution.
"""

import math

import numpy as np
import pytest
import torch

from mmengine.runtime.sampling.gumbel import gumbel_noise, philox4x32, token_bits

CPU = torch.device("cpu")
# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of_integers(counter, key):
    """Return the generator's four words, computed with Python's unbounded integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 % 2**32, (p0 >> 32) ^ x3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


@pytest.mark.parametrize("counter,key,result", KNOWN)
def test_known_answers(counter, key, result):
    assert philox_of_integers(counter, key) == result
    words = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == result


def test_token_bits_are_the_words_of_their_key():
    seeds = np.array([0, 2**63 - 1, 12345678901234567], np.int64)
    samples, outputs = np.array([0, 63, 2]), np.array([0, 10**7, 5])
    bits = token_bits(seeds, samples, outputs, 11, CPU)
    assert bits.shape == (3, 11)
    for r in range(3):
        key = (int(seeds[r]) % 2**32, int(seeds[r]) >> 32)
        for token in range(11):
            words = philox_of_integers((token // 4, int(outputs[r]), int(samples[r]), 0), key)
            assert int(bits[r, token]) == words[token % 4]


@pytest.mark.parametrize("vocab_size", [5, 61, 1536, 1537])
def test_noise_does_not_depend_on_the_batch(vocab_size):
    seeds, samples, outputs = np.arange(9), np.arange(9) % 3, np.arange(9) * 7
    together = gumbel_noise(seeds, samples, outputs, vocab_size, CPU)
    assert together.isfinite().all()
    for low, high in ((0, 1), (3, 4), (2, 7), (8, 9)):
        part = gumbel_noise(seeds[low:high], samples[low:high], outputs[low:high], vocab_size, CPU)
        assert torch.equal(part, together[low:high])


def test_extreme_bits_stay_finite(monkeypatch):
    bits = torch.tensor([[0, 1, 2**31, 2**32 - 2, 2**32 - 1]])
    monkeypatch.setattr("mmengine.runtime.sampling.gumbel.token_bits", lambda *_: bits)
    noise = gumbel_noise(None, None, None, 5, CPU)[0]
    assert noise.isfinite().all()
    assert (noise.diff() <= 0).all()
    assert noise[0] == pytest.approx(33 * math.log(2), abs=1e-4)
    assert noise[4] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-4)


def test_noise_is_gumbel_distributed():
    """Check moments and quantiles of 400,000 values. The tolerances are more than five standard errors."""
    noise = gumbel_noise(np.arange(100), np.zeros(100), np.arange(100) // 10, 4000, CPU).double().view(-1)
    assert float(noise.mean()) == pytest.approx(0.57721566, abs=0.012)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    for p in (0.01, 0.1, 0.5, 0.9, 0.99, 0.9999):
        below = float((noise <= -math.log(-math.log(p))).double().mean())
        assert below == pytest.approx(p, abs=6 * math.sqrt(p * (1 - p) / len(noise)))


def test_neighbouring_keys_are_uncorrelated():
    """Noise is uncorrelated if the seed, sample index, output index or token differs."""
    n = 60000
    base = gumbel_noise(np.array([5]), np.array([0]), np.array([0]), n, CPU)[0]
    others = [
        gumbel_noise(np.array([6]), np.array([0]), np.array([0]), n, CPU)[0],
        gumbel_noise(np.array([5 + 2**32]), np.array([0]), np.array([0]), n, CPU)[0],
        gumbel_noise(np.array([5]), np.array([1]), np.array([0]), n, CPU)[0],
        gumbel_noise(np.array([5]), np.array([0]), np.array([1]), n, CPU)[0],
        base.roll(1),
        base.roll(4),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1]
        assert abs(float(correlation)) < 6 / math.sqrt(n)

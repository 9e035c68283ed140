"""Computes Gumbel noise from a counter-based generator, so that a sampled token depends only on the row's
logits and a key.

The token is argmax(logits + noise). This draws a token with the probabilities softmax(logits) (the Gumbel-max
trick). The noise for token v is computed from 32 random bits. The generator is Philox4x32-10 (Salmon, Moraes,
Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011), which returns four 32-bit words for each
call:

    key      low and high 32 bits of the request's seed
    counter  v // 4, output index, sample index, 0
    word     v % 4

Earlier calls, the batch and the row have no influence. The random bits are equal on all devices; only the two
float32 logarithms may differ slightly.
"""

import numpy as np
import torch

from mmengine.runtime.device.upload import upload

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
WORDS = 4
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def philox4x32(counter: tuple, key: tuple, rounds: int = ROUNDS) -> tuple:
    """Return four words from the generator. All operands and results are int64 tensors with 32-bit values.

    The operands must be broadcastable. Products may wrap in int64, because only their low 64 bits are used.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # x1 and x3 are masked in the next round.
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x2 = ((p1 >> 32) ^ x1 ^ k0) & _LOW, ((p0 >> 32) ^ x3 ^ k1) & _LOW
        x1, x3 = p1, p0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return x0, x1 & _LOW, x2, x3 & _LOW


def token_bits(
    seeds: np.ndarray,
    sample_index: np.ndarray,
    output_index: np.ndarray,
    vocab_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Return 32 random bits for each row and token id, int64 [r, vocab_size], from integer arrays [r]."""
    seeds = seeds.astype(np.int64)
    keys = np.stack((seeds & _LOW, (seeds >> 32) & _LOW, output_index, sample_index)).astype(np.int64)
    low, high, output, sample = upload(keys, device)[:, :, None].unbind(0)
    blocks = torch.arange(-(-vocab_size // WORDS), device=device)[None]
    words = philox4x32((blocks, output, sample, torch.zeros_like(sample)), (low, high))
    return torch.stack(words, dim=-1).view(len(seeds), -1)[:, :vocab_size]


def gumbel_noise(
    seeds: np.ndarray,
    sample_index: np.ndarray,
    output_index: np.ndarray,
    vocab_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [r, vocab_size], between about -2.8 and 22.9.

    With u = (bits + 1/2) / 2^32 the noise is -log(-log(1 - u)). Only large noise affects the sample. Large
    noise results from small u, for which float32 is precise.
    """
    bits = token_bits(seeds, sample_index, output_index, vocab_size, device)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()

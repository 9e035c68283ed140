"""Filter a distribution: temperature, then top-k, top-p, min-p and typical-p, each applied to the previous
result.

All functions take and return float32 logits [r, vocab_size] and per-row parameters [r, 1]; a filtered token
gets -inf. Tokens with equal logits are kept or filtered together, so a filter may keep more than k tokens or
more than p of the mass: the result never depends on a sort's order.
"""

import torch

from mmengine.runtime.rows import NEVER

# Smaller temperatures are greedy to the last bit of a logit; the bound keeps 0 / T finite.
MIN_TEMPERATURE = 1e-10


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature. The shift cannot overflow and changes no probability."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.div_(temperature.clamp(min=MIN_TEMPERATURE))


def keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Keep the `top_k` most likely tokens, and among these the fewest that reach mass `top_p`."""
    return logits.masked_fill(logits < top_bound(logits, top_k, top_p, largest_k), NEVER)


def top_bound(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Return the smallest logit that `keep_top` keeps, [r, 1].

    A row's top_k is int64 in 1 to `largest_k`, which is at most vocab_size (a row without top-k has
    vocab_size); top_p 1 keeps all. The most likely token is always kept. Both filters work on the k largest
    values and give a bound on the logits.
    """
    best = logits.topk(largest_k, dim=-1).values
    among = torch.arange(largest_k, device=logits.device) < top_k
    mass = best.masked_fill(~among, NEVER).softmax(dim=-1)
    before = mass.cumsum(-1).roll(1, dims=-1)
    before[:, 0] = 0
    # Rounding must not cut the tail of a row with top_p 1.
    kept = ((before < top_p) | (top_p >= 1)) & among
    return best.gather(-1, kept.sum(-1, keepdim=True) - 1)


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least `min_p` times as likely as the most likely token."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log(), NEVER)


def keep_typical(logits: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose information is closest to the entropy, the fewest that reach mass `typical_p`.

    From Meister et al., Locally Typical Sampling, 2023.
    """
    logprobs = logits.log_softmax(dim=-1)
    likelihoods = logprobs.exp()
    entropy = -(logprobs * likelihoods).nansum(-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    nearest, order = distance.sort(dim=-1, stable=True)
    mass = likelihoods.gather(-1, order).cumsum(-1)
    last = (mass < typical_p).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    return logits.masked_fill(distance > nearest.gather(-1, last), NEVER)

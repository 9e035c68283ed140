"""Temperature and filters in torch. The filters top-k, top-p, min-p and typical-p are applied one after
another.

The functions take float32 logits [r, vocab_size] and one parameter for each row [r, 1]. They return logits
with -inf for filtered tokens. Tokens with equal logits are either all kept or all filtered. The result
therefore does not depend on how a sort orders equal logits. If logits are equal, a filter may keep more than
k tokens, or more probability mass than p.
"""

import torch

from mmengine.runtime.rows import NEVER

# Lower temperatures are raised to this value. Sampling is greedy at this value, and 0 / T stays finite.
MIN_TEMPERATURE = 1e-10


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature. The subtraction does not change probabilities."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.div_(temperature.clamp(min=MIN_TEMPERATURE))


def keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Keep the `top_k` most likely tokens, then the smallest subset whose mass is at least `top_p`."""
    return logits.masked_fill(logits < top_bound(logits, top_k, top_p, largest_k), NEVER)


def top_bound(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Return the smallest logit that `keep_top` keeps, [r, 1].

    `top_k`: int64, from 1 to `largest_k`. `largest_k` is at most vocab_size, and a `top_k` of vocab_size
    turns top-k off. A `top_p` of 1 turns top-p off. The most likely token is always kept.
    """
    best = logits.topk(largest_k, dim=-1).values
    among = torch.arange(largest_k, device=logits.device) < top_k
    mass = best.masked_fill(~among, NEVER).softmax(dim=-1)
    before = mass.cumsum(-1).roll(1, dims=-1)
    before[:, 0] = 0
    # With top_p 1 all k tokens are kept, even if rounding makes a cumulative sum reach 1 too early.
    kept = ((before < top_p) | (top_p >= 1)) & among
    return best.gather(-1, kept.sum(-1, keepdim=True) - 1)


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose probability is at least `min_p` times that of the most likely token."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log(), NEVER)


def keep_typical(logits: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of typical tokens whose mass is at least `typical_p`.

    The closer a token's information (-log p) is to the distribution's entropy, the more typical is the token
    (Meister et al., Locally Typical Sampling, 2023).
    """
    logprobs = logits.log_softmax(dim=-1)
    likelihoods = logprobs.exp()
    entropy = -(logprobs * likelihoods).nansum(-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    nearest, order = distance.sort(dim=-1, stable=True)
    mass = likelihoods.gather(-1, order).cumsum(-1)
    last = (mass < typical_p).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    return logits.masked_fill(distance > nearest.gather(-1, last), NEVER)

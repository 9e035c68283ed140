"""A decoder layer's feed-forward in torch: a SwiGLU or a mixture of experts.

Tokens are sorted by expert, so that each expert multiplies all its tokens in a single product per matrix.
Rounding is as in transformers: an expert's output is rounded, multiplied by the expert's probability, and
rounded again. A token's `top_k` results are added in float32, the likeliest expert's result first.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.decoder.prepacked import Linear
from mmengine.native.decoder_weights import LayerWeights
from mmengine.native.feed_forward import Dense, Mixture

FeedForward = Dense[Linear] | Mixture[Linear, Tensor]  # A mixture's tensors are [count, out, in].
TorchLayer = LayerWeights[Linear, FeedForward]
Gate = Callable[[Tensor], Tensor]  # Maps [t, 2 * wide] to [t, wide]: silu(first half) * second half.
_ALIGNED_BYTES = 16  # The row alignment in bytes that torch's grouped products require.


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def feed_forward(weights: FeedForward, gate: Gate = silu_mul) -> Linear:
    """Return the feed-forward as a function from x [t, hidden] to [t, hidden]."""
    if isinstance(weights, Dense):
        return lambda x: weights.down(gate(weights.gate_up(x)))
    return lambda x: _mix(weights, gate, x)


def _mix(weights: Mixture[Linear, Tensor], gate: Gate, x: Tensor) -> Tensor:
    chances, chosen = route(weights.router(x), weights.top_k, weights.norm_top_k)
    by_expert, order = chosen.flatten().sort()
    experts = torch.arange(len(weights.down), device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True).int()
    wide = gate(_grouped(x[order // weights.top_k], weights.gate_up, ends))
    found = x.new_empty(len(order), x.shape[1])
    found[order] = _grouped(wide, weights.down, ends)
    mixed = (found.unflatten(0, chosen.shape) * chances[..., None]).sum(1)
    if weights.shared is None or weights.shared_gate is None:
        return mixed
    shared = weights.shared.down(gate(weights.shared.gate_up(x)))
    return mixed + weights.shared_gate(x).sigmoid() * shared


def route(logits: Tensor, top_k: int, norm_top_k: bool) -> tuple[Tensor, Tensor]:
    """Return the experts' probabilities (in the logits' dtype) and ids (int64), each [t, top_k], the
    likeliest expert first. `logits`: the router's output [t, count].
    """
    chances, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if norm_top_k:
        chances = chances / chances.sum(-1, keepdim=True)
    return chances.to(logits.dtype), chosen


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row in x [s, in] by the weight [out, in] of its expert. The rows must be sorted by
    expert.

    `weights`: [count, out, in]. `ends`: int32 [count], where each expert's rows end. Waits for the device
    only if torch's grouped product does not support the sizes.
    """
    if x.shape[1] * x.itemsize % _ALIGNED_BYTES == 0 and weights.shape[1] * x.itemsize % _ALIGNED_BYTES == 0:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].long().cpu())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

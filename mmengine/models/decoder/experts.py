"""A layer's feed-forward in torch: a SwiGLU, or a mixture of experts with transformers' sums in the same
order.

Pairs of a token and an expert are sorted by expert, so that each expert's rows are a single product. The
product is rounded, weighted and rounded again; a token's `top_k` results are added in float32, the likeliest
first.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.decoder.prepacked import Linear
from mmengine.native.decoder_weights import LayerWeights
from mmengine.native.feed_forward import Dense, Mixture

FeedForward = Dense[Linear] | Mixture[Linear, Tensor]  # With experts [count, out, in].
TorchLayer = LayerWeights[Linear, FeedForward]
Gate = Callable[[Tensor], Tensor]  # [t, 2 * wide] to silu of the first half times the second.
_ALIGNED_BYTES = 16  # Alignment of rows in torch's grouped products.


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def feed_forward(weights: FeedForward, gate: Gate = silu_mul) -> Linear:
    """Return a function that maps x [t, hidden] to [t, hidden]."""
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
    """Choose experts by the router's logits [t, count]. Returns probabilities in the logits' dtype and expert
    ids, int64, [t, top_k] each, the likeliest first.
    """
    chances, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if norm_top_k:
        chances = chances / chances.sum(-1, keepdim=True)
    return chances.to(logits.dtype), chosen


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of x [s, in] up to each of `ends`, int32 [count], by a weight [out, in] each.

    Never waits for the device, except for sizes that torch does not multiply in groups.
    """
    if x.shape[1] * x.itemsize % _ALIGNED_BYTES == 0 and weights.shape[1] * x.itemsize % _ALIGNED_BYTES == 0:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].long().cpu())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

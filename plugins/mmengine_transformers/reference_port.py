"""Attention over one sequence, written in plain torch. When a model is loaded, probe.py runs the decoder with
this attention.
"""

import torch
from torch import Tensor

from mmengine.models.plugin import LayerAttention


class ReferencePort:
    """An AttentionPort for one row, which stores all keys and values in float32."""

    def __init__(self, layers: tuple[LayerAttention, ...]) -> None:
        self._layers = layers
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer in self._kv:
            before_k, before_v = self._kv[layer]
            k, v = torch.cat((before_k, k)), torch.cat((before_v, v))
        self._kv[layer] = k, v

    def run(self, layer: int, q: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        spec = self._layers[layer]
        k, v = (each.float() for each in self._kv[spec.kv_layer])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[2] ** -0.5
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~visible(spec, len(k) - len(q), len(k), q.device), float("-inf"))
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
            weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def visible(spec: LayerAttention, first: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return the mask for the tokens from `first` on, bool [num_tokens - first, num_tokens]: True for visible
    keys.
    """
    query = torch.arange(first, num_tokens, device=device)[:, None]
    key = torch.arange(num_tokens, device=device)[None]
    seen = key <= query
    if spec.window:
        seen = seen & (key > query - spec.window)
    if spec.chunk:
        seen = seen & (key // spec.chunk == query // spec.chunk)
    return seen

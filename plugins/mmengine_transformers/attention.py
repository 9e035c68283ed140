"""The attention function that transformers' modules call. It uses mmengine's paged KV.

transformers finds the function by its name (AttentionInterface) and passes the calling module. Each attention
module has a HostedLayer as its attribute `mmengine_layer`, which knows the layer's index in the KV pool.
mmengine registers no mask function under this name, so transformers builds no mask.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from mmengine.models.plugin import AttentionPort, LayerAttention, SinkAttentionPort

NAME = "mmengine"
ATTRIBUTE = "mmengine_layer"


class Heads(NamedTuple):
    """Head counts and sizes in a layer or in the KV pool. The pool's values are at least as large as every
    layer's.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(slots=True)
class StepContext:
    """State that all attention layers share during a forward pass: the port, and positions int64 [t]."""

    port: AttentionPort | None = None
    positions: Tensor | None = None


class HostedLayer:
    """Connects an attention module to layer `index` of an attention port.

    In the port, all layers have the pool's head counts and sizes (`pool`). For a module with smaller counts
    or sizes, this class pads keys, values and queries with zeros, and repeats KV heads. Padding and
    repetition do not change the output.
    """

    def __init__(
        self, index: int, spec: LayerAttention, heads: Heads, pool: Heads, scale: float, context: StepContext
    ) -> None:
        """`scale`: the module's factor for scores. The port's factor is (the pool's head_dim) ** -0.5.
        Queries are multiplied by the module's factor divided by the port's factor.
        """
        self._index, self._spec, self._context = index, spec, context
        self._stores = spec.kv_layer == index
        self._heads, self._pool = heads, pool
        self._is_plain = heads == Heads(*pool[:3], pool.head_dim)
        factor = scale * pool.head_dim**0.5
        self._factor = 1.0 if abs(factor - 1) < 1e-6 else factor
        self._repeats = pool.num_kv_heads // heads.num_kv_heads

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the attention output [1, t, heads, value_dim] for q, k and v, [1, heads, t, head size]."""
        port = self._context.port
        if port is None:
            raise RuntimeError("attention was called outside a step")
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        if self._factor != 1.0:
            q = q * self._factor
        if not self._is_plain:
            q, k, v = self._padded_queries(q), self._padded_kv(k), self._padded_kv(v)
        if self._stores:
            port.append(self._index, k, v)
        if self._spec.has_sinks and sinks is not None:
            out = cast(SinkAttentionPort, port).run(self._index, q, sinks=self._padded_sinks(sinks))
        else:
            out = port.run(self._index, q)
        return (out if self._is_plain else self._unpadded(out))[None]

    def _padded_kv(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, self._pool.head_dim - x.shape[2]))
        return x if self._repeats == 1 else x.repeat_interleave(self._repeats, 1)

    def _padded_queries(self, q: Tensor) -> Tensor:
        grouped = q.unflatten(1, (self._heads.num_kv_heads, -1))
        more = self._group - grouped.shape[2]
        return F.pad(grouped, (0, self._pool.head_dim - q.shape[2], 0, more)).flatten(1, 2)

    def _padded_sinks(self, sinks: Tensor) -> Tensor:
        grouped = sinks.view(self._heads.num_kv_heads, -1)
        return F.pad(grouped, (0, self._group - grouped.shape[1])).flatten()

    def _unpadded(self, out: Tensor) -> Tensor:
        grouped = out.unflatten(1, (self._heads.num_kv_heads, -1))
        size = self._heads.num_heads // self._heads.num_kv_heads
        return grouped[:, :, :size, : self._heads.value_dim].flatten(1, 2)

    @property
    def _group(self) -> int:
        """Return how many query heads of the pool belong to one KV head of the layer."""
        return self._pool.num_heads // self._heads.num_kv_heads


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention with the module's HostedLayer, for transformers' AttentionInterface.

    The arguments for windows, soft caps and scales are ignored. HostedLayer already has these values, because
    calls.py recorded the module's call when the model was loaded.
    """
    return getattr(module, ATTRIBUTE).attend(query, key, value, s_aux), None


AttentionInterface.register(NAME, attend)


def use_attention(decoder: nn.Module, name: str) -> None:
    """Make every module in a decoder call the attention function `name`."""
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name

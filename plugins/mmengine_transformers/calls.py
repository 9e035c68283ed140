"""Records how a decoder calls attention. Derives each layer's attention and the KV pool's heads from these
calls.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from mmengine.errors import ModelError
from mmengine.models.plugin import LayerAttention
from mmengine_transformers.attention import Heads

RECORDER = "mmengine_recorder"
RECORDS = "mmengine_records"
HEAD_STEP = 8  # The CPU kernels need head sizes that are multiples of this number.
# Arguments of an attention call that affect neither the visible keys nor the scores.
NEUTRAL = frozenset(
    ["dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
     "output_router_logits", "return_dict", "is_causal", "deterministic", "target_dtype"]
)  # fmt: skip


@dataclass(slots=True)
class AttentionCall:
    """One call of the attention function, with the sizes of its arguments."""

    module: nn.Module
    heads: Heads
    num_tokens: int
    num_keys: int
    key: Tensor = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    has_mask: bool = False

    @property
    def scale(self) -> float:
        """Return the factor for the scores."""
        given = self.options.get("scaling")
        return float(self.heads.head_dim**-0.5 if given is None else given)


def record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Record the call. Return zeros with the attention output's shape."""
    heads = Heads(query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    call = AttentionCall(
        module, heads, query.shape[2], key.shape[2], key, options, attention_mask is not None
    )
    getattr(module, RECORDS).append(call)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(RECORDER, record)


@contextmanager
def recording(decoder: nn.Module) -> Iterator[list[AttentionCall]]:
    """Collect a decoder's attention calls inside the context. The decoder must use the attention function
    RECORDER.
    """
    calls: list[AttentionCall] = []
    modules = list(decoder.modules())
    for module in modules:
        setattr(module, RECORDS, calls)
    try:
        yield calls
    finally:
        for module in modules:
            delattr(module, RECORDS)


def layers_of(
    name: str, calls: list[AttentionCall], num_layers: int, num_tokens: int, *, is_causal: bool = True
) -> tuple[LayerAttention, ...]:
    """Return each layer's attention. Raises ModelError for calls that a paged KV cache cannot serve.

    `name`: the architecture, for messages. `num_layers`: number of layers in the decoder. `is_causal`: False
    for a model whose prompt tokens all see one another.
    """
    _check_counts(name, calls, num_layers)
    layers: list[LayerAttention] = []
    stored: dict[int, int] = {}  # A key tensor's storage -> the first layer with this storage.
    for index, call in enumerate(calls):
        _check_call(name, call, num_tokens, is_causal)
        options = call.options
        origin = stored.setdefault(call.key.untyped_storage()._cdata, index)
        layers.append(
            LayerAttention(
                kv_layer=origin,
                window=int(options.get("sliding_window") or 0),
                softcap=float(options.get("softcap") or 0),
                has_sinks=options.get("s_aux") is not None,
            )
        )
    return tuple(layers)


def pool_heads(name: str, calls: list[AttentionCall]) -> Heads:
    """Return the KV pool's heads, into which every layer's heads fit. Keys and values have the same size, a
    multiple of HEAD_STEP. Raises ModelError if no heads can fit every layer.
    """
    heads = [call.heads for call in calls]
    for each in heads:
        if each.num_heads % each.num_kv_heads:
            raise ModelError(
                f"{name} cannot be served: {each.num_heads} heads do not divide into {each.num_kv_heads} KV "
                "heads"
            )
    num_kv_heads = math.lcm(*(each.num_kv_heads for each in heads))
    group = max(-(-each.num_heads // num_kv_heads) for each in heads)
    size = max(max(each.head_dim, each.value_dim) for each in heads)
    size = -(-size // HEAD_STEP) * HEAD_STEP
    if num_kv_heads > max(each.num_heads for each in heads):
        raise ModelError(f"{name} cannot be served: its layers' numbers of KV heads do not divide each other")
    return Heads(group * num_kv_heads, num_kv_heads, size, size)


def with_value_sizes(
    layers: tuple[LayerAttention, ...], calls: list[AttentionCall], pool: Heads
) -> tuple[LayerAttention, ...]:
    """Return the layers, with `value_dim` set where a layer's values are smaller than the pool's heads."""
    sizes = [call.heads.value_dim for call in calls]
    return tuple(
        replace(layer, value_dim=size) if size < pool.head_dim else layer
        for layer, size in zip(layers, sizes, strict=True)
    )


def _check_counts(name: str, calls: list[AttentionCall], num_layers: int) -> None:
    seen = [id(call.module) for call in calls]
    if len(set(seen)) < len(seen):
        raise ModelError(f"{name} cannot be served: a layer calls attention more than once per token")
    if len(seen) != num_layers:
        raise ModelError(
            f"{name} cannot be served: {num_layers} layers call attention {len(seen)} times, so some layers "
            "keep their state elsewhere or are repeated"
        )


def _check_call(name: str, call: AttentionCall, num_tokens: int, is_causal: bool) -> None:
    reason = ""
    strange = sorted(
        each
        for each, value in call.options.items()
        if value is not None and each not in NEUTRAL | {"scaling", "sliding_window", "softcap", "s_aux"}
    )
    if call.has_mask:
        reason = "the model builds its attention masks itself"
    elif call.num_keys != num_tokens or call.num_tokens != num_tokens:
        reason = f"a layer has {call.num_keys} keys for {num_tokens} tokens"
    elif strange:
        reason = f"attention gets the unknown arguments {', '.join(strange)}"
    elif is_causal and False in (call.options.get("is_causal"), getattr(call.module, "is_causal", True)):
        reason = "a layer's attention is not causal"
    if reason:
        raise ModelError(f"{name} cannot be served: {reason}")

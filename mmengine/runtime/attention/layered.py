"""Selects a backend for each attention layer: the fastest backend that supports the layer's features.

The CPU kernels support all features except runs, which are tokens that attend to one another in both
directions. Other fast backends support only plain causal layers. Torch computes all other layers.
"""

import structlog
import torch

from mmengine.errors import ConfigError
from mmengine.models.spec import ModelSpec
from mmengine.runtime.attention.base import AttentionBackend, AttentionMeta, Bucket
from mmengine.runtime.attention.masked_paged import MaskedPagedAttention
from mmengine.runtime.attention.native_paged import LayerRules, NativePagedAttention
from mmengine.runtime.kv.pool import KVPool

log = structlog.get_logger("mmengine.operators")


class LayeredAttention:
    """Implements AttentionBackend with several backends. `fast`: a backend for plain layers, or the CPU
    kernels, or None. Layers that share KV use the same index in the pool.
    """

    captures = False

    def __init__(self, spec: ModelSpec, kv: KVPool, fast: AttentionBackend | None) -> None:
        self._places = spec.kv_places
        self._fast, self._masked = fast, MaskedPagedAttention(spec, kv, spec.attention)
        self._native = fast if isinstance(fast, NativePagedAttention) else None
        self._rules = [LayerRules.of(layer) for layer in spec.attention]
        self._sees_runs = [layer.sees_runs for layer in spec.attention]
        native, plain = self._native is not None, fast is not None
        self._is_fast = [native or (plain and each.is_plain(spec.head_dim)) for each in spec.attention]
        self._has_runs = False  # whether any token in this step belongs to a run
        needs_torch = any(self._sees_runs) or not all(self._is_fast)
        self.reads_unwritten = needs_torch or (fast is not None and fast.reads_unwritten)

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        if self._fast is not None:
            self._fast.begin(meta)
        self._has_runs = meta.run_ids is not None and bool((meta.run_ids >= 0).any())
        if not all(self._is_fast) or (self._has_runs and any(self._sees_runs)):
            self._masked.begin(meta)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        (self._fast or self._masked).append(self._places[layer], k, v)

    def run(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend. `sinks`: a score for each head, [num_heads], in layers with attention
        sinks.
        """
        if not self._is_fast[layer] or (self._has_runs and self._sees_runs[layer]):
            return self._masked.run(layer, q, sinks)
        if self._native is not None:
            return self._native.run_layer(self._places[layer], q, self._rules[layer], sinks)
        assert self._fast is not None
        return self._fast.run(self._places[layer], q)


def masked_features(spec: ModelSpec) -> dict[str, int]:
    """Return feature name -> layer count, for features beyond plain causal attention."""
    features = {
        "windows": [layer.window > 0 for layer in spec.attention],
        "chunks": [layer.chunk > 0 for layer in spec.attention],
        "soft caps": [layer.softcap > 0 for layer in spec.attention],
        "sinks": [layer.has_sinks for layer in spec.attention],
        "scales": [layer.scale not in (0, spec.head_dim**-0.5) for layer in spec.attention],
        "runs in both directions": [layer.sees_runs for layer in spec.attention],
    }
    return {name: sum(each) for name, each in features.items() if any(each)}


def check_spec(spec: ModelSpec, name: str) -> None:
    """Raise ConfigError if `spec` contradicts itself, or if the backend `name` lacks a feature that `spec`
    uses.
    """
    problem = spec.problem()
    if problem is not None:
        raise ConfigError(f"the model's attention cannot be used: {problem}")
    features = masked_features(spec)
    if features and name not in ("auto", "native", "torch"):
        raise ConfigError(
            f"attention {name!r} does not compute {', '.join(features)}, which this model has; choose 'auto' "
            "or 'torch'"
        )


def log_features(spec: ModelSpec) -> None:
    """Log how many layers torch computes, by feature."""
    counts = {name: f"{count} layers" for name, count in masked_features(spec).items()}
    if not counts:
        return
    log.info(f"attention by torch in some of {len(spec.attention)} layers", **counts)

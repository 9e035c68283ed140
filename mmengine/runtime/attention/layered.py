"""Chooses a backend for each attention layer: the fastest one for plain layers, torch for all others."""

import structlog
import torch

from mmengine.errors import ConfigError
from mmengine.models.spec import ModelSpec
from mmengine.runtime.attention.base import AttentionBackend, AttentionMeta, Bucket
from mmengine.runtime.attention.masked_paged import MaskedPagedAttention
from mmengine.runtime.kv.pool import KVPool

log = structlog.get_logger("mmengine.operators")


class LayeredAttention:
    """See AttentionBackend. `plain`: the backend for plain layers, or None if there are none. Layers that
    share KV name the layer that stores it.
    """

    captures = False

    def __init__(self, spec: ModelSpec, kv: KVPool, plain: AttentionBackend | None) -> None:
        self._places = spec.kv_places
        self._is_plain = [plain is not None and layer.is_plain(spec.head_dim) for layer in spec.attention]
        self._plain, self._masked = plain, MaskedPagedAttention(spec, kv, spec.attention)
        self.reads_unwritten = self._masked.reads_unwritten

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        if self._plain is not None:
            self._plain.begin(meta)
        self._masked.begin(meta)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        (self._plain or self._masked).append(self._places[layer], k, v)

    def run(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend. `sinks`: a score for each head, [num_heads], for layers with sinks."""
        if self._is_plain[layer] and self._plain is not None:
            return self._plain.run(self._places[layer], q)
        return self._masked.run(layer, q, sinks)


def masked_features(spec: ModelSpec) -> dict[str, int]:
    """Return how many layers have each feature that only torch computes, keyed by the feature's name."""
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
    """Raise ConfigError if `spec` contradicts itself, or if the backend called `name` lacks its features."""
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
    """Log which layers torch computes."""
    counts = {name: f"{count} layers" for name, count in masked_features(spec).items()}
    log.info(f"attention by torch in some of {len(spec.attention)} layers", **counts)

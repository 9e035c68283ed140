"""Attention for models with several groups of layers. Each group has its own slots and block tables in the
same KV pool.
"""

from collections.abc import Callable, Sequence

import msgspec
import torch

from mmengine.block_groups import BlockGroup
from mmengine.models.layer_groups import group_spec
from mmengine.models.spec import ModelSpec
from mmengine.runtime.attention.base import AttentionBackend, AttentionMeta, Bucket
from mmengine.runtime.attention.layered import LayeredAttention


class GroupedAttention:
    """Implements AttentionBackend with a backend for each group. A group's layers are numbered from 0."""

    captures = False

    def __init__(
        self,
        spec: ModelSpec,
        groups: Sequence[BlockGroup],
        make: Callable[[ModelSpec], AttentionBackend],
    ) -> None:
        """`make`: returns a backend for the layers in a group."""
        self._backends: list[AttentionBackend] = []
        self._of_layer: dict[int, tuple[AttentionBackend, int]] = {}
        for group in groups:
            own, members = group_spec(spec, group)
            backend = make(own)
            self._backends.append(backend)
            self._of_layer.update((number, (backend, place)) for place, number in enumerate(members))
        self.reads_unwritten = any(backend.reads_unwritten for backend in self._backends)

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        first, *others = self._backends
        first.begin(meta)
        for backend, window in zip(others, meta.windows, strict=True):
            slots, table = window
            backend.begin(msgspec.structs.replace(meta, slots=slots, table=table, windows=()))

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        backend, place = self._of_layer[layer]
        backend.append(place, k, v)

    def run(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend. `sinks`: attention sink scores, [num_heads]."""
        backend, place = self._of_layer[layer]
        if sinks is None:
            return backend.run(place, q)
        assert isinstance(backend, LayeredAttention)  # groups with sinks always have this backend
        return backend.run(place, q, sinks)

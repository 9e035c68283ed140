"""The text decoder on a GPU, with fused kernels between the matmuls. Not yet run on a GPU.

A layer has four matmuls, attention, and four fused kernels. The first kernel normalizes and rotates q and k,
and stores k and v in the KV cache. Two kernels add to the residual and compute the next norm. The last kernel
computes the SiLU gate. A fused kernel rounds only its result. text.py rounds after each operation, as
transformers does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mmengine.gpu.text_ops import TextOps
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.experts import TorchLayer
from mmengine.models.decoder.text import TextDecoder, aux_layer
from mmengine.models.lora.adapter import AdapterRows
from mmengine.models.plugin import AttentionPort, AuxHiddenStates
from mmengine.models.reader import WeightReader
from mmengine.models.sharding import Shard
from mmengine.models.states import StepStates


class FusedTextDecoder(TextDecoder):
    """A TextDecoder that uses the kernels `ops` between matmuls."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightReader,
        device: torch.device,
        ops: TextOps,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(config, weights, device, shard, ops.linear, ops.silu_mul)
        self.ops, self.batch_invariant = ops, ops.batch_invariant

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        positions: Tensor,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
        states: StepStates | None = None,
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """Compute all layers and return the normed hidden states [t, hidden]. Fills `aux_hidden_states.rows`.

        `embeds`: [t, hidden]. `deepstack`: [n, t, hidden], zero at text tokens, or None. `positions`: int64
        [3, t].
        """
        if adapters:
            return self._adapted(adapters).forward(embeds, deepstack, positions, attention, aux_hidden_states)
        angles = self._rotary.halves(positions)
        eps, ops = self.config.rms_norm_eps, self.ops
        residual = embeds.clone()  # Cloned, because the kernels add to the residual in place.
        if aux_hidden_states is not None:
            aux_layer(aux_hidden_states, 0, residual)
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            mixed = self._mix(index, layer, normed, angles, attention)
            normed = ops.add_norm(mixed, residual, layer.post_norm, eps)
            added = self._sum(self._feed_forwards[index](normed))
            if deepstack is not None and index < len(deepstack):
                # The next norm uses the same kernel as without deepstack. Text tokens have zero features, so
                # they get the same bits as in a step without media.
                residual.add_(added)
                added = deepstack[index].clone()
            normed = ops.add_norm(added, residual, next_norm, eps)
            if aux_hidden_states is not None:
                aux_layer(aux_hidden_states, index + 1, residual)
        return normed

    def _mix(
        self,
        index: int,
        layer: TorchLayer,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionPort,
    ) -> Tensor:
        c = self.config
        qkv = layer.qkv(normed).view(len(normed), -1, c.head_dim)
        cache = attention.cache_of(index) if hasattr(attention, "cache_of") else None
        self.ops.norm_rotate(qkv, layer.qk_norm, *angles, c.rms_norm_eps, c.num_heads, cache)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
        if cache is None:
            attention.append(index, k, v)
        return self._sum(layer.out(attention.run(index, q).reshape(len(normed), -1)))

"""Compares this plugin's logits with the logits from the model's own forward. The plugin computes two short
rows in chunks.

Call `own_logits` before kernels replace the decoder's norms, so that the comparison also checks the kernels.
"""

import torch
from torch import Tensor

from mmengine.errors import ModelError
from mmengine.models.plugin import LayerAttention
from mmengine_transformers.attention import NAME, use_attention
from mmengine_transformers.body import DecoderBody
from mmengine_transformers.classes import text_config
from mmengine_transformers.head import Head
from mmengine_transformers.parts import ModelParts
from mmengine_transformers.reference_port import ReferencePort

ROWS = ((12, 5), (7, 3))  # For each row: its length, and the length of its first chunk.
# Limits in float32 and in 16 bits for the difference between the plugin's and the model's logits, relative to
# the largest logit. In 16 bits, the limit applies to the median over the tokens: rounding may change a
# token's experts and then all its logits.
EXACT_LIMIT, ROUNDED_LIMIT = 1e-3, 0.1


class TwoRows:
    """An AttentionPort for two rows of tokens. Each row has its own ReferencePort."""

    def __init__(self, layers: tuple[LayerAttention, ...]) -> None:
        self._rows = [ReferencePort(layers) for _ in ROWS]
        self.counts: tuple[int, ...] = ()

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        for row, own_k, own_v in zip(self._rows, k.split(self.counts), v.split(self.counts), strict=True):
            row.append(layer, own_k, own_v)

    def run(self, layer: int, q: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        pairs = zip(self._rows, q.split(self.counts), strict=True)
        return torch.cat([row.run(layer, own, sinks=sinks) for row, own in pairs])


def own_logits(parts: ModelParts, device: torch.device) -> Tensor:
    """Return the logits from the model's own forward, for all tokens in ROWS: float32 [t, vocab_size]."""
    use_attention(parts.decoder, "eager")
    rows = _token_ids(parts, device)
    return torch.cat([parts.model(input_ids=row[None], use_cache=False).logits[0].float() for row in rows])


def _token_ids(parts: ModelParts, device: torch.device) -> list[Tensor]:
    size = text_config(parts.model.config).vocab_size
    # From the middle of the vocabulary, because media tokens at its ends may be computed differently.
    return [(size // 2 + torch.arange(3, 3 + 5 * count, 5, device=device)) % size for count, _ in ROWS]


def check_logits(
    own: Tensor,
    parts: ModelParts,
    body: DecoderBody,
    head: Head,
    layers: tuple[LayerAttention, ...],
) -> None:
    """Raise ModelError if the plugin's logits differ too much from `own`, the result of `own_logits`.
    Afterwards the decoder uses the plugin's attention function.
    """
    device = own.device
    ids = _token_ids(parts, device)
    use_attention(parts.decoder, NAME)
    port, found = TwoRows(layers), []
    chunks = [[(0, first) for _, first in ROWS], [(first, count) for count, first in ROWS]]
    for chunk in chunks:
        port.counts = tuple(end - start for start, end in chunk)
        input_ids = torch.cat([row[start:end] for row, (start, end) in zip(ids, chunk)])
        embeds = parts.embedding(input_ids)
        positions = torch.cat([torch.arange(start, end, device=device) for start, end in chunk])
        hidden = body(input_ids, embeds, positions.expand(3, -1), port)
        found.append(head(hidden).split(port.counts))
    ours = torch.cat([torch.cat(pieces) for pieces in zip(*found, strict=True)])
    gaps = (ours - own).abs().amax(-1) / own.abs().max().clamp(min=1e-6)
    is_exact = embeds.dtype == torch.float32
    gap, limit = float(gaps.max() if is_exact else gaps.median()), EXACT_LIMIT if is_exact else ROUNDED_LIMIT
    if not gap <= limit:
        raise ModelError(
            f"{type(parts.model).__name__} cannot be served: on two short rows in chunks the logits differ "
            f"from the model's own by {gap:.1%} of the largest"
        )

"""Computes the inputs that some decoders need beside the embeddings."""

import torch
from torch import Tensor

from mmengine_transformers.classes import text_config
from mmengine_transformers.media.rules import media_token_ids
from mmengine_transformers.parts import ModelParts


class TokenInputs:
    """A decoder's additional inputs for token ids.

    Gemma 3n and 4 take per-layer embeddings. ERNIE 4.5-VL takes a mask of the tokens that use the vision
    experts.
    """

    def __init__(self, parts: ModelParts) -> None:
        config = text_config(parts.model.config)
        has_layers = bool(getattr(config, "hidden_size_per_layer_input", 0))
        self._per_layer = getattr(parts.decoder, "get_per_layer_inputs", None) if has_layers else None
        # Media placeholders get the per-layer embeddings of the padding token.
        self._padding = int(getattr(config, "pad_token_id", None) or 0)
        tokens = sorted(media_token_ids(parts.model.config))
        self._placeholders = torch.tensor(tokens, device=parts.model.device) if tokens else None
        self._vision = _vision_tokens(parts)

    def __call__(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the additional inputs, by argument name, for token ids int64 [t]."""
        ids = input_ids[None]
        if self._vision is not None:
            return {"moe_mm_token_type_ids": torch.isin(ids, self._vision).long()}
        if self._per_layer is None:
            return {}
        if self._placeholders is not None:
            ids = ids.masked_fill(torch.isin(ids, self._placeholders), self._padding)
        return {"per_layer_inputs": self._per_layer(ids)}


def _vision_tokens(parts: ModelParts) -> Tensor | None:
    """Return the tokens that use the vision experts (ERNIE 4.5-VL), or None for other models. The tokens are
    the media placeholders and the start and end tokens around them.
    """
    config = parts.model.config
    if config.model_type != "ernie4_5_vl_moe":
        return None
    marks = [
        getattr(config, f"{kind}_{end}_token_id") for kind in ("image", "video") for end in ("start", "end")
    ]
    return torch.tensor(sorted({*media_token_ids(config), *marks}), device=parts.model.device)

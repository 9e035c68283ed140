"""Runs a transformers decoder on a ragged batch: rows of different lengths without padding."""

from typing import Any

import torch
from torch import Tensor

from mmengine.models.plugin import AttentionPort
from mmengine_transformers.attention import StepContext
from mmengine_transformers.media.positions import GridPositions
from mmengine_transformers.parts import ModelParts
from mmengine_transformers.token_inputs import TokenInputs


class DecoderBody:
    """Computes hidden states with the decoder's own forward. Attention calls go to an AttentionPort.

    `grid`: computes positions for decoders with several position rows.
    """

    def __init__(self, parts: ModelParts, context: StepContext, grid: GridPositions | None = None) -> None:
        self._decoder, self._context, self.grid_positions = parts.decoder, context, grid
        self._token_inputs = TokenInputs(parts)
        self._options: dict[str, Any] = {"use_cache": False, "attention_mask": None, "return_dict": True}

    def __call__(
        self,
        input_ids: Tensor,
        embeds: Tensor,
        positions: Tensor,
        port: AttentionPort,
        deepstack: Tensor | None = None,
    ) -> Tensor:
        """Return the normed hidden states [t, hidden] for token ids int64 [t], embeds [t, hidden] and
        positions int64 [rows, t].
        """
        context, options = self._context, {**self._options, **self._token_inputs(input_ids)}
        if deepstack is not None:
            options["visual_pos_masks"] = torch.ones(1, len(embeds), dtype=torch.bool, device=embeds.device)
            options["deepstack_visual_embeds"] = list(deepstack.unbind(0))
        grid = self.grid_positions
        shaped = positions[:1] if grid is None else grid.unpack(positions)[:, None]
        context.port, context.positions = port, positions[0]
        try:
            out = self._decoder(inputs_embeds=embeds[None], position_ids=shaped, **options)
        finally:
            context.port = context.positions = None
        return out.last_hidden_state[0]

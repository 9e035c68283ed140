"""Runs a transformers decoder over one ragged batch."""

from typing import Any

import torch
from torch import Tensor

from mmengine.models.plugin import AttentionPort
from mmengine_transformers.attention import StepContext
from mmengine_transformers.parts import ModelParts
from mmengine_transformers.token_inputs import TokenInputs


class DecoderBody:
    """Computes hidden states with the decoder's own forward, whose attention goes to a port.

    `position_rows`: 0 if the decoder takes one row of positions, else the number of rows.
    """

    def __init__(self, parts: ModelParts, context: StepContext, position_rows: int = 0) -> None:
        self._decoder, self._context, self._position_rows = parts.decoder, context, position_rows
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
        rows = self._position_rows
        shaped = positions[:rows, None] if rows else positions[:1]
        context.port, context.positions = port, positions[0]
        try:
            out = self._decoder(inputs_embeds=embeds[None], position_ids=shaped, **options)
        finally:
            context.port = context.positions = None
        return out.last_hidden_state[0]

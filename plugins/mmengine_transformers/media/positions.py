"""Computes a prompt's M-RoPE positions with the model's own `get_rope_index`.

The runtime stores three position values per token. Hunyuan-VL needs four: index, width, height and image
number. For image tokens, this module therefore packs width and number into a single value.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmengine.errors import InvalidRequest, ModelError, in_one_line
from mmengine.models.decoder.positions import text_positions
from mmengine.request import MediaItem
from mmengine_transformers.media.rules import image_token_id

_ROWS = 3
_PAIRED = 1 << 30  # Bit that marks a value with two packed rows.
_BITS = 15  # Number of bits for each of the two rows.


def grid_positions(model: Any) -> "GridPositions | None":
    """Return GridPositions for a model with `get_rope_index`, or None for a model with one row of
    positions.
    """
    core = getattr(model, "model", model)
    return GridPositions(core) if hasattr(core, "get_rope_index") else None


class GridPositions:
    """The rotary positions for a model with `get_rope_index`. `num_rows`: number of position rows that the
    decoder takes.
    """

    def __init__(self, core: Any) -> None:
        """`core`: the module with `get_rope_index`. Raises ModelError unless the model has 3 or 4 rows of
        positions.
        """
        self._index = core.get_rope_index
        self._taken = inspect.signature(self._index).parameters
        self._image = image_token_id(core.config)
        self.num_rows = len(self._own(np.arange(4), ())[0])
        if self.num_rows not in (_ROWS, _ROWS + 1):
            raise ModelError(
                f"{type(core).__name__} has {self.num_rows} rows of positions; 3 or 4 can be served"
            )

    def __call__(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """See ModelPlugin.positions. Raises InvalidRequest if an item's placeholder tokens do not match its
        grid.
        """
        if not media:
            return text_positions(len(prompt_token_ids))
        try:
            rows, delta = self._own(prompt_token_ids, media)
        except (ValueError, RuntimeError, IndexError) as error:
            raise InvalidRequest(
                f"the model cannot place these media in the prompt: {in_one_line(error, 200)}"
            ) from None
        if self.num_rows == _ROWS:
            return rows.astype(np.int32), delta
        index, width, height, number = rows
        if (index != np.arange(len(index))).any() or len(index) >= 1 << _BITS:
            raise InvalidRequest(f"a prompt of {len(index)} tokens has positions that two rows cannot hold")
        is_text = np.asarray(prompt_token_ids) != self._image
        paired = np.where(is_text, index, _PAIRED | width << _BITS | number)
        return np.stack([index, paired, height]).astype(np.int32), delta

    def unpack(self, positions: Tensor) -> Tensor:
        """Convert a step's positions, int64 [3, t], to the decoder's positions, int64 [num_rows, t]."""
        if self.num_rows == _ROWS:
            return positions
        index, paired, height = positions
        is_paired = paired >= _PAIRED
        mask = (1 << _BITS) - 1
        width = torch.where(is_paired, (paired >> _BITS) & mask, paired)
        number = torch.where(is_paired, paired & mask, paired)
        return torch.stack([index, width, height, number])

    def _own(self, token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """Return the model's own positions [rows, n] and the delta for output tokens."""
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        kinds = torch.zeros_like(ids)
        grids: dict[str, Tensor | None] = {}
        # Token ids cannot tell images from videos, because GLM-4V uses the same placeholder for both.
        for number, kind in enumerate(("image", "video"), 1):
            items = [item for item in media if item.modality == kind]
            for start, length in (run for item in items for run in item.runs):
                kinds[0, start : start + length] = number
            grids[f"{kind}_grid_thw"] = torch.tensor([item.grid for item in items]) if items else None
        seconds = [item.interval for item in media if item.interval is not None]
        intervals = {"second_per_grid_ts": torch.tensor(seconds)} if seconds else {}
        given = {"mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids), **grids, **intervals}
        taken = {name: value for name, value in given.items() if name in self._taken}
        rows, delta = self._index(ids, **taken)
        return rows[:, 0].numpy(), int(delta.reshape(-1)[0])

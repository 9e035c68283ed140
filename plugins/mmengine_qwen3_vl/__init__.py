"""Qwen3-VL: the plugin object. Importing this imports neither torch nor the processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmengine.request import MediaItem
from mmengine_qwen3_vl.config import ARCHITECTURE
from mmengine_qwen3_vl.positions import rope_positions
from mmengine_qwen3_vl.weights import fingerprint

if TYPE_CHECKING:  # heavy: see Qwen3VLPlugin
    from mmengine.models.plugin import Processor
    from mmengine.models.sharding import Shard
    from mmengine_qwen3_vl.model import Qwen3VL


class Qwen3VLPlugin:
    """Dense Qwen3-VL of every size; a ModelPlugin. Its imports are lazy because they are heavy."""

    architectures = (ARCHITECTURE,)

    def load_processor(self, folder: Path) -> "Processor":
        from mmengine_qwen3_vl.processing import load_processor

        return load_processor(folder)

    def load_model(
        self,
        folder: Path,
        *,
        device: str,
        dtype: str,
        shard: "Shard | None" = None,
        batch_invariant: bool = False,
    ) -> "Qwen3VL":
        from mmengine_qwen3_vl.model import load_model

        return load_model(folder, device=device, dtype=dtype, shard=shard, batch_invariant=batch_invariant)

    def fingerprint(self, folder: Path) -> str:
        return fingerprint(folder)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        return rope_positions(len(prompt_token_ids), media)


plugin = Qwen3VLPlugin()

"""Qwen3-VL: the plugin object. Importing this imports neither torch nor the processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.request import MediaItem
from mmengine_qwen3_vl.config import ARCHITECTURE, read_config
from mmengine_qwen3_vl.names import NAMES
from mmengine_qwen3_vl.positions import rope_positions

if TYPE_CHECKING:  # heavy: see Qwen3VLPlugin
    from mmengine.models.network import Network
    from mmengine.models.plugin import Processor
    from mmengine.models.sharding import Shard


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
    ) -> "Network":
        from mmengine.models.network import load_network

        return load_network(
            folder,
            read_config(folder),
            NAMES,
            device=device,
            dtype=dtype,
            shard=shard,
            batch_invariant=batch_invariant,
        )

    def fingerprint(self, folder: Path) -> str:
        return fingerprint(folder, NAMES)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        return rope_positions(len(prompt_token_ids), media)


plugin = Qwen3VLPlugin()

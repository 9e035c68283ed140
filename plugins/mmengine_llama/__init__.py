"""Llama, and text models that are the same decoder: the plugin object. Importing this imports neither torch
nor the processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.models.decoder.positions import text_positions
from mmengine.request import MediaItem
from mmengine_llama.config import KINDS, NAMES, read_config

if TYPE_CHECKING:  # heavy: see LlamaPlugin
    from mmengine.models.network import Network
    from mmengine.models.plugin import Processor
    from mmengine.models.sharding import Shard


class LlamaPlugin:
    """Text models of every size, in folders and GGUF files; a ModelPlugin. Its imports are lazy because they
    are heavy."""

    architectures = tuple(KINDS)

    def load_processor(self, folder: Path) -> "Processor":
        from mmengine_llama.processing import load_processor

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
        return text_positions(len(prompt_token_ids))


plugin = LlamaPlugin()

"""The model plugin for Qwen3.5, and for later models with the same architecture. Importing this module
imports neither torch nor the processor.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmengine.models.described_plugin import DescribedPlugin
from mmengine.models.mtp.files import MtpHead, open_mtp_head
from mmengine.models.plugin import Processor
from mmengine.request import MediaItem
from mmengine_qwen3_5.config import ARCHITECTURES, ModelConfig, read_config, read_head
from mmengine_qwen3_5.names import NAMES
from mmengine_qwen3_vl.positions import rope_positions


class Qwen35Plugin(DescribedPlugin):
    """Serves Qwen3.5 models that read images and video, and text-only Qwen3.5 models."""

    architectures = ARCHITECTURES
    names = NAMES

    def read_config(self, folder: Path) -> ModelConfig:
        return read_config(folder)

    def load_processor(self, folder: Path) -> Processor:
        from mmengine_qwen3_5.processing import load_processor  # Imported late: loads Pillow and tokenizers.

        return load_processor(folder)

    def draft_head(self, folder: Path) -> MtpHead | None:
        """Return the checkpoint's multi-token-prediction head, or None without a head."""
        text = self.read_config(folder).text
        decoder = read_head(folder, text)
        return None if decoder is None else open_mtp_head(folder, self.names, decoder, text.num_layers)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        return rope_positions(len(prompt_token_ids), media)


plugin = Qwen35Plugin()

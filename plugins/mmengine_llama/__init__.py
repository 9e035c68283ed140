"""The model plugin for Llama, and for text models with the same decoder. Importing this module imports
neither torch nor the processor.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmengine.models.decoder.positions import text_positions
from mmengine.models.described_plugin import DescribedPlugin
from mmengine.models.plugin import Processor
from mmengine.request import MediaItem
from mmengine_llama.config import KINDS, NAMES, ModelConfig, read_config


class LlamaPlugin(DescribedPlugin):
    """Serves Llama and similar text models of every size, from folders and GGUF files."""

    architectures = tuple(KINDS)
    names = NAMES

    def read_config(self, folder: Path) -> ModelConfig:
        return read_config(folder)

    def load_processor(self, folder: Path) -> Processor:
        from mmengine_llama.processing import load_processor  # Imported late: loads tokenizers and templates.

        return load_processor(folder)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        return text_positions(len(prompt_token_ids))


plugin = LlamaPlugin()

"""The model plugin for Qwen3-VL. Importing this module imports neither torch nor the processor."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmengine.models.box_unit import BoxUnit
from mmengine.models.described_plugin import DescribedPlugin
from mmengine.models.plugin import Processor
from mmengine.request import MediaItem
from mmengine_qwen3_vl.config import ARCHITECTURES, ModelConfig, read_config
from mmengine_qwen3_vl.names import NAMES
from mmengine_qwen3_vl.positions import rope_positions


class Qwen3VLPlugin(DescribedPlugin):
    """Serves Qwen3-VL models of every size: dense models and mixtures of experts."""

    architectures = ARCHITECTURES
    names = NAMES
    box_units = {"qwen3_vl": BoxUnit("thousandths"), "qwen3_vl_moe": BoxUnit("thousandths")}

    def read_config(self, folder: Path) -> ModelConfig:
        return read_config(folder)

    def load_processor(self, folder: Path) -> Processor:
        from mmengine_qwen3_vl.processing import load_processor  # Imported late: loads Pillow and tokenizers.

        return load_processor(folder)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        return rope_positions(len(prompt_token_ids), media)


plugin = Qwen3VLPlugin()

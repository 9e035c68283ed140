"""The model plugin for SmolVLM2. Importing this module imports neither torch nor the processor."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.models.decoder.positions import text_positions
from mmengine.models.described_plugin import DescribedPlugin
from mmengine.models.plugin import Processor
from mmengine.request import MediaItem
from mmengine_smolvlm.config import ARCHITECTURE, ModelConfig, read_config
from mmengine_smolvlm.names import NAMES


class SmolVLMPlugin(DescribedPlugin):
    """Serves SmolVLM2 in every size. Images become tiles, and videos become frames. Positions count tokens,
    as in a text model.
    """

    architectures = (ARCHITECTURE,)
    names = NAMES

    def read_config(self, folder: Path) -> ModelConfig:
        return read_config(folder)

    def load_processor(self, folder: Path) -> Processor:
        from mmengine_smolvlm.processing import load_processor  # Imported late: loads Pillow and tokenizers.

        return load_processor(folder)

    def positions(self, prompt_token_ids: np.ndarray, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """Return a prompt's positions. Each item must have an embedding run for each tile, and all runs in an
        item must have the same length. Otherwise raises InvalidRequest.
        """
        for item in media:
            if len(item.runs) != item.grid[0] or len({length for _, length in item.runs}) != 1:
                raise InvalidRequest(
                    f"a {item.modality} of {item.grid[0]} tiles cannot have embedding runs {item.runs[:8]}: "
                    "one run for each tile, all of the same length, is expected"
                )
        return text_positions(len(prompt_token_ids))


plugin = SmolVLMPlugin()

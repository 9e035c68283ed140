"""Engine settings that describe the model, such as which layers share KV blocks.

The engine fills in these settings when it loads the model. The log's event STARTED records them, so replays
make the same decisions without the model.
"""

from typing import Annotated

import msgspec

from mmengine.block_groups import MAX_GROUPS, BlockGroup, longest_row, most_blocks
from mmengine.engine_settings import EngineSettings
from mmengine.setting_fields import described


class ModelSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """EngineSettings, extended by the settings that describe the model."""

    atomic_runs: Annotated[
        bool,
        described(
            "Whether one step computes all tokens of an image, or of a video's frame; set by the model. An "
            "image with more tokens than a step is refused."
        ),
    ] = False
    whole_prompt: Annotated[
        bool,
        described(
            "Whether one step computes a request's whole prompt; set by the model. A prompt with more tokens "
            "than a step is refused."
        ),
    ] = False
    block_groups: Annotated[
        tuple[BlockGroup, ...],
        msgspec.Meta(max_length=MAX_GROUPS),
        described(
            "Layers that share KV blocks, as `window` and `layers`; set by the model. A group with a window "
            "frees the blocks before the window. Empty: all layers share the same blocks."
        ),
    ] = ()

    @property
    def num_groups(self) -> int:
        """Return the number of block groups. For each `block_size` tokens, a request gets one block per
        group.
        """
        return len(self.block_groups) or 1

    @property
    def uniform_window(self) -> int:
        """Return the window that all layers share, or 0. With vLLM's rules (`compat`), the result is always
        0.
        """
        return self.block_groups[0].window if len(self.block_groups) == 1 and not self.compat else 0

    def most_blocks(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a request with `num_tokens` tokens needs, summed over all
        groups.
        """
        return most_blocks(self.block_groups, num_tokens, self.block_size, self.token_budget)

    def longest_row(self, num_blocks: int) -> int:
        """Return the maximum length in tokens of a request that fits into `num_blocks` blocks, which include
        the dummy block.
        """
        return longest_row(self.block_groups, num_blocks - 1, self.block_size, self.token_budget)

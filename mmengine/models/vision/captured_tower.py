"""The vision tower with inputs and outputs at fixed addresses, so that its kernel launches can be captured in
a CUDA graph.

A step writes its inputs: pixels, position embeddings, cosines, sines, and each frame's start. If the step has
fewer patches than the captured size, the unused patches form an additional frame. No other frame attends to
this frame. The graph has a fixed number of frames, so the remaining frames are empty. This class has not been
run on a GPU yet.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmengine.gpu.vision_ops import VisionOps
from mmengine.models.plugin import EncoderSize
from mmengine.models.vision.segments import RotationThere, attend_packed, upload_into
from mmengine.models.vision.tower import VisionTower


class CapturedVision:
    """Implements the protocol CapturableEncoder (mmengine/models/plugin.py). Each segment is a frame. `ops`:
    the tower's kernels.
    """

    def __init__(self, tower: VisionTower, ops: VisionOps, largest: EncoderSize) -> None:
        config, count = tower.config, largest.num_patches
        self._tower, self._ops = tower, ops

        def zeros(rows: int, *width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, *width, dtype=dtype, device=tower.device)

        self.patches = zeros(count, config.patch_width, dtype=torch.uint8)
        self._positions = zeros(count, config.hidden_size, dtype=tower.dtype)
        self._cos = zeros(count, config.head_dim, dtype=torch.float32)
        self._sin = torch.zeros_like(self._cos)
        # The start of each frame in a step, the start of the unused patches, and the end.
        self._starts = zeros(largest.num_segments + 2, dtype=torch.int32)
        width = (1 + len(config.deepstack_layers)) * config.out_hidden_size
        self._features = zeros(count // config.merge_size**2, width, dtype=tower.dtype)

    def num_segments(self, grids: Sequence[tuple[int, int, int]]) -> int:
        return sum(t for t, _, _ in grids)

    def place(self, size: EncoderSize, num_patches: int, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        starts = np.full(size.num_segments + 2, size.num_patches, np.int32)
        starts[0] = 0
        if num_patches or grids:
            self._tower.check_grids(num_patches, grids)
            frames = self._tower.frames_of(grids)
            for name, fixed in (("positions", self._positions), ("cos", self._cos), ("sin", self._sin)):
                torch.cat([getattr(frame, name) for frame in frames], out=fixed[:num_patches])
            np.cumsum([len(frame.cos) for frame in frames], out=starts[1 : 1 + len(frames)])
        upload_into(torch.from_numpy(starts), self._starts)
        return self._features_of(num_patches)

    def compute(self, size: EncoderSize) -> None:
        count = size.num_patches
        frames = RotationThere(
            self._cos[:count], self._sin[:count], self._starts[: size.num_segments + 2], longest=count
        )
        self._tower.compute(
            self.patches[:count],
            self._positions[:count],
            lambda qkv, out: attend_packed(self._ops, qkv, self._tower.config.num_heads, frames),
            features=self._features_of(count),
        )

    def _features_of(self, num_patches: int) -> Tensor:
        return self._features[: num_patches // self._tower.config.merge_size**2]

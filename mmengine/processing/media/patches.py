"""Computes the sizes to which frames are resized, and cuts frames into patches for the vision encoder.

The size rule is transformers' "smart resize". It rounds the height and the width to multiples of `factor`,
and brings the number of pixels into a range. The aspect ratio stays nearly the same.
"""

import math
from dataclasses import dataclass

import numpy as np

from mmengine.errors import InvalidMedia

MAX_RATIO = 200  # Maximum ratio of the long side to the short side.


@dataclass(frozen=True, slots=True)
class PatchSettings:
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    @property
    def factor(self) -> int:
        """Return the side length, in pixels, of the square for one embedding."""
        return self.patch_size * self.merge_size

    def embeds(self, grid: tuple[int, int, int]) -> int:
        """Return the number of embeddings per temporal patch for a `grid` (t, h, w) in patches."""
        return grid[1] * grid[2] // self.merge_size**2


def image_size(height: int, width: int, factor: int, low: int, high: int, where: str) -> tuple[int, int]:
    """Return the size (height, width) for an image: multiples of `factor`, with `low` to `high` pixels."""
    _check_ratio(height, width, f"{width} x {height}", where)
    return _fit(1, 1, height, width, factor, low, high)


def video_size(
    num_frames: int, height: int, width: int, patches: PatchSettings, low: int, high: int, where: str
) -> tuple[int, int]:
    """Return the size (height, width) for a video's frames. `low` and `high` limit the pixels of all frames
    together.
    """
    factor, shown = patches.factor, f"{width} x {height}"
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(height, width, shown, where)
    temporal = patches.temporal_patch_size
    return _fit(num_frames, round(num_frames / temporal) * temporal, height, width, factor, low, high)


def _fit(
    frames: int, rounded_frames: int, height: int, width: int, factor: int, low: int, high: int
) -> tuple[int, int]:
    near_height = round(height / factor) * factor
    near_width = round(width / factor) * factor
    pixels = rounded_frames * near_height * near_width
    if pixels > high:
        shrink = math.sqrt(frames * height * width / high)
        near_height = max(factor, math.floor(height / shrink / factor) * factor)
        near_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif pixels < low:
        grow = math.sqrt(low / (frames * height * width))
        near_height = math.ceil(height * grow / factor) * factor
        near_width = math.ceil(width * grow / factor) * factor
    return near_height, near_width


def _check_ratio(height: int, width: int, shown: str, where: str) -> None:
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidMedia(
            f"{where} is {shown} pixels; the longer side may be at most {MAX_RATIO} times the shorter one"
        )


def patchify(frames: np.ndarray, settings: PatchSettings) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames, uint8 [t, 3, h, w], into patches. Return (rows, grid (t, h, w) in patches).

    The number of frames must be a multiple of the temporal patch size. Rows are uint8 [patches, 3 * temporal
    * patch * patch]. The merge x merge patches that become one embedding are adjacent rows.
    """
    count, channels, height, width = frames.shape
    patch, merge, temporal = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    grid = (count // temporal, height // patch, width // patch)
    blocks = frames.reshape(
        grid[0], temporal, channels, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch
    )
    rows = blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    rows = rows.reshape(math.prod(grid), channels * temporal * patch * patch)
    return np.ascontiguousarray(rows), grid

"""What it takes to encode an image or a video, in whole numbers: a log derives them again from what it holds.

A unit is what all layers of the encoder take for one patch beside attention. Attention grows with the square
of a frame: at `even_patches` of them it takes as much as everything else. What a unit and that number are on
a machine is measured when a model is loaded (models/vision/measured.py).
"""

EVEN_PATCHES = 4096  # where nothing was measured


def work_of(grid: tuple[int, int, int], even_patches: int) -> int:
    """Units for an item of `grid`, patches (t, h, w); a patch attends to the h * w patches of its frame."""
    frames, frame = grid[0], grid[1] * grid[2]
    return frames * (frame + frame * frame // (even_patches or EVEN_PATCHES))

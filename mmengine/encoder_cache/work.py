"""Computes the encoder work for an image or a video in integers, so that a replay computes the same numbers.

A unit is the time that all encoder layers take for one patch, without attention. The time for attention grows
with the square of a frame's patches: with `even_patches` patches, attention takes as long as everything else.
A unit's time and `even_patches` are measured when a model is loaded (models/vision/tower_cost.py).
"""

EVEN_PATCHES = 4096  # default without a measurement


def work_of(grid: tuple[int, int, int], even_patches: int) -> int:
    """Return the units of work for an item. `grid`: patches (t, h, w). A patch attends to the h * w patches
    in its frame. `even_patches`: 0 means EVEN_PATCHES.
    """
    frames, frame = grid[0], grid[1] * grid[2]
    return frames * (frame + frame * frame // (even_patches or EVEN_PATCHES))

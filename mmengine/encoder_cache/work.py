"""Measure encoder work for an image or a video in whole numbers, which a log can derive again.

A unit is the time that all layers of the encoder take for one patch, apart from attention. Attention grows
with a frame's square: with `even_patches` patches it takes as much as everything else. A unit's time and
`even_patches` are measured when a model is loaded (models/vision/tower_cost.py).
"""

EVEN_PATCHES = 4096  # default without a measurement


def work_of(grid: tuple[int, int, int], even_patches: int) -> int:
    """Return the units for an item with `grid`, patches (t, h, w). A patch attends to the h * w patches in
    its frame.
    """
    frames, frame = grid[0], grid[1] * grid[2]
    return frames * (frame + frame * frame // (even_patches or EVEN_PATCHES))

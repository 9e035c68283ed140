"""Estimates the encoder work for an image or a video. The estimates are integers, so that replays reproduce
the logged numbers.

A unit of work is the time to compute a patch in all encoder layers, without attention. The time for attention
grows with the square of a frame's patch count. In a frame with `even_patches` patches, attention takes as
long as all other operations. The unit's duration and `even_patches` are measured when a model is loaded
(models/vision/tower_cost.py).
"""

EVEN_PATCHES = 4096  # default without a measurement


def work_of(grid: tuple[int, int, int], even_patches: int) -> int:
    """Return the units of work for an image or a video.

    `grid`: number of patches (t, h, w). A patch attends to all h * w patches in the same frame. If
    `even_patches` is 0, EVEN_PATCHES is used.
    """
    frames, frame = grid[0], grid[1] * grid[2]
    return frames * (frame + frame * frame // (even_patches or EVEN_PATCHES))

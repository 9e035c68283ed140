"""Estimates the encoder work for an image or a video. The numbers are integers, so that replays compute the
logged numbers again.

One unit of work is the time that all encoder layers together need for one patch, without attention. The time
for attention grows with the square of the number of patches in a frame. In a frame with `even_patches`
patches, attention takes as long as all other operations together. The unit's duration and `even_patches` are
measured when a model is loaded (models/vision/tower_cost.py).
"""

EVEN_PATCHES = 4096  # default without a measurement


def work_of(grid: tuple[int, int, int], even_patches: int) -> int:
    """Return the units of work for an image or a video.

    `grid`: number of patches (t, h, w). A patch attends to the h * w patches of its frame. `even_patches`: 0
    means EVEN_PATCHES.
    """
    frames, frame = grid[0], grid[1] * grid[2]
    return frames * (frame + frame * frame // (even_patches or EVEN_PATCHES))

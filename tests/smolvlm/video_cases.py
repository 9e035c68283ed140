"""Videos of odd sizes and lengths, drawn from a seed, and the options they are processed with."""

from typing import NamedTuple

import numpy as np

PROMPT = "look <video>what happens?"


class VideoCase(NamedTuple):
    shape: tuple[int, int, int]  # frames, height, width
    fps: float
    options: dict = {}
    indices: tuple[int, ...] | None = None  # sampled before


CASES = (
    VideoCase((12, 40, 40), 4.0),
    VideoCase((31, 97, 53), 10.0),
    VideoCase((5, 20, 200), 2.0),
    VideoCase((220, 24, 36), 10.0, {"num_frames": 4}),  # so long that its ends are left out
    VideoCase((40, 61, 30), 8.0, {"fps": 2.5}),
    VideoCase((3, 200, 301), 30.0),
    VideoCase((6, 33, 31), 12.5, {}, (0, 3, 5, 8, 11, 900)),
)


def draw(case: VideoCase) -> np.ndarray:
    """uint8 [t, h, w, 3]: gradients that move, with noise and hard edges."""
    frames, height, width = case.shape
    rng = np.random.default_rng([frames, height, width])
    y, x = np.mgrid[:height, :width]
    video = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    for i in range(frames):
        video[i, : height // 2, :, 0] = ((x * 3 + y * 2 + i * 40) % 256)[: height // 2]
        video[i, height // 3 :, : width // 2, 1] = 255 * ((x + i) // 4 % 2)[height // 3 :, : width // 2]
    return video

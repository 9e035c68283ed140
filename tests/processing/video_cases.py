"""Random videos with odd sizes and lengths, and their processing options."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

PROMPT = "look<|vision_start|><|video_pad|><|vision_end|>what happens, 1 2 3?"


@dataclass(frozen=True)
class VideoCase:
    shape: tuple[int, int, int]  # Frames, height, width.
    fps: float | None = None  # Frame rate of the source; None: unknown.
    # Options that transformers' processor and ours share.
    options: dict[str, Any] = field(default_factory=dict)
    # The frames' indices in the source video, if the caller sampled the frames. Requires the option
    # do_sample_frames=False.
    indices: tuple[int, ...] | None = None
    size: tuple[int, int] | None = None  # Minimum and maximum pixels of the whole video.
    cap: bool = False


CASES = (
    VideoCase((8, 64, 64)),
    VideoCase((5, 97, 53)),
    VideoCase((2, 20, 500), options={"do_sample_frames": False}),
    VideoCase((3, 301, 77), options={"do_sample_frames": False}),
    VideoCase((7, 128, 96), fps=30.0),
    VideoCase((61, 50, 70), fps=10.0),
    VideoCase((9, 33, 31), 12.5, {"do_sample_frames": False}, (0, 3, 5, 8, 11, 13, 16, 19, 21)),
    VideoCase((20, 240, 427), options={"num_frames": 5}),
    VideoCase((16, 45, 90), fps=8.0, options={"fps": 4}),
    VideoCase((48, 41, 123)),
    VideoCase((4, 700, 301), fps=29.97, size=(4096, 25165824)),
    VideoCase((10, 150, 211), fps=3.0, size=(16384, 262144), cap=True),
)


def draw(case: VideoCase) -> np.ndarray:
    """Return uint8 [t, h, w, 3]: moving gradients with noise and hard edges."""
    frames, height, width = case.shape
    rng = np.random.default_rng([frames, height, width])
    y, x = np.mgrid[:height, :width]
    video = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    for i in range(frames):
        smooth = ((x * 3 + y * 2 + i * 40) % 256).astype(np.uint8)
        video[i, : height // 2, :, 0] = smooth[: height // 2]
        video[i, height // 3 :, : width // 2, 1] = 255 * ((x + i) // 4 % 2)[height // 3 :, : width // 2]
    return video

"""Videos with odd sizes and lengths, and their processing options."""

from typing import NamedTuple

PROMPT = "look <video>what happens?"


class VideoCase(NamedTuple):
    shape: tuple[int, int, int]  # Frames, height, width.
    fps: float
    options: dict = {}
    # The frames' indices in the original video, for frames that were already sampled.
    indices: tuple[int, ...] | None = None


CASES = (
    VideoCase((12, 40, 40), 4.0),
    VideoCase((31, 97, 53), 10.0),
    VideoCase((5, 20, 200), 2.0),
    # In a video with this length, the processor skips the first and last second.
    VideoCase((220, 24, 36), 10.0, {"num_frames": 4}),
    VideoCase((40, 61, 30), 8.0, {"fps": 2.5}),
    VideoCase((3, 200, 301), 30.0),
    VideoCase((6, 33, 31), 12.5, {}, (0, 3, 5, 8, 11, 900)),
)

"""Interprets a video file's metadata about its frames: the frame rate and the display matrix."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

MAX_FPS = 1000.0  # Maximum frame rate; a higher rate in a file is ignored.
_MAX_RATIO = 1.5  # Maximum ratio between the stated frame rate and the mean rate.
_MATRIX_BYTES = 36


def frame_rate(seconds: float, num_frames: int, stated: float) -> float | None:
    """Return a video's frames per second, or None if unknown.

    `seconds`: the time from the first frame to the last; 0 if unknown. `stated`: the rate in the file or
    FFmpeg's estimate; 0 if unknown. If the stated rate contradicts the mean rate, the mean rate is used. For
    example, browsers record videos without a rate, and FFmpeg then reports the clock's 1,000 ticks per
    second.
    """
    fps = stated if 0 < stated <= MAX_FPS else 0.0
    mean = (num_frames - 1) / seconds if seconds > 0 else 0.0
    if 0 < mean <= MAX_FPS and (not fps or _contradicts(fps, mean, num_frames)):
        fps = mean
    return fps or None


def _contradicts(fps: float, mean: float, num_frames: int) -> bool:
    """Return whether the two rates are too different for a video with `num_frames` frames."""
    is_far = max(fps, mean) > _MAX_RATIO * min(fps, mean)
    # A file may contain frames that are not shown. Therefore, the durations that follow from the two rates
    # may differ by 2 frame intervals. In videos with fewer than 5 frames, the durations may differ by half
    # the number of frame intervals.
    missing = abs(num_frames / fps - num_frames / mean) * mean
    return is_far and missing > min(2, (num_frames - 1) / 2)


def shown(pixels: np.ndarray, frame: "VideoFrame") -> np.ndarray:
    """Rotate and mirror a frame, uint8 [h, w, 3], as its display matrix says.

    The matrix maps (x, y) to (a x + c y, b x + d y). Angles are rounded to quarter turns.
    """
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    raw = b"" if data is None else bytes(data)
    if len(raw) < _MATRIX_BYTES:
        return pixels
    a, b, _, c, d = np.frombuffer(raw, np.int32, 5).tolist()
    if abs(a) + abs(d) >= abs(b) + abs(c):
        across, down = a, d
    else:
        pixels, across, down = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1]

"""Interprets what a video file says about its frames: their rate and their display matrix."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

MAX_FPS = 1000.0  # A higher rate in a file is ignored.
_MAX_RATIO = 1.5  # Between the stated rate and the times' mean rate, unless they differ by two frames.
_MATRIX_BYTES = 36


def frame_rate(seconds: float, num_frames: int, stated: float) -> float | None:
    """Return a video's frames per second, or None if the file has neither times nor a usable rate.

    `seconds`: from the first frame's time to the last's, 0 if unknown. `stated`: the rate in the file or
    FFmpeg's estimate, 0 if unknown. Recordings of browsers state no rate, and FFmpeg then reports the clock's
    1,000 ticks. The mean rate of the times is therefore used if the stated rate contradicts it.
    """
    fps = stated if 0 < stated <= MAX_FPS else 0.0
    mean = (num_frames - 1) / seconds if seconds > 0 else 0.0
    if 0 < mean <= MAX_FPS and (not fps or _contradicts(fps, mean, num_frames)):
        fps = mean
    return fps or None


def _contradicts(fps: float, mean: float, num_frames: int) -> bool:
    """Whether so many frames at `fps` take much longer or much less long than at `mean`."""
    is_far = max(fps, mean) > _MAX_RATIO * min(fps, mean)
    return is_far and abs(num_frames / fps - num_frames / mean) * mean > 2


def shown(pixels: np.ndarray, frame: "VideoFrame") -> np.ndarray:
    """Turn and mirror a frame, uint8 [h, w, 3], as its display matrix says.

    The matrix maps (x, y) to (a x + c y, b x + d y). Only quarter turns and mirroring are applied: of another
    angle, the nearest quarter turn.
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

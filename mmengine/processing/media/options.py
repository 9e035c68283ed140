"""Checks the options of images and videos, and returns them as typed objects. The options have transformers'
names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmengine.errors import InvalidMedia, InvalidRequest

MAX_SIDE = 2**15  # Maximum of resized_height and resized_width.
MAX_PIXELS = 2**28  # Maximum of min_pixels, max_pixels and total_pixels.
MAX_FRAMES = 2048  # Maximum of nframes, min_frames and max_frames.
SPLITS, LONGEST = "do_image_splitting", "longest_edge"  # For models that split images into tiles.

_NUMBERS = {  # name -> (lowest value, highest value, whether only whole numbers are allowed)
    "min_pixels": (1, MAX_PIXELS, True),
    "max_pixels": (1, MAX_PIXELS, True),
    "total_pixels": (1, 2**40, False),
    "total_min_pixels": (1, 2**40, False),
    LONGEST: (1, MAX_SIDE, True),
    "resized_height": (1, MAX_SIDE, True),
    "resized_width": (1, MAX_SIDE, True),
    "fps": (1e-3, 1000.0, False),
    "nframes": (1, MAX_FRAMES, True),
    "num_frames": (1, MAX_FRAMES, True),
    "min_frames": (1, MAX_FRAMES, True),
    "max_frames": (1, MAX_FRAMES, True),
    "video_start": (0.0, 1e6, False),
    "video_end": (0.0, 1e6, False),
    "sample_fps": (1e-3, 1000.0, False),
    "raw_fps": (1e-3, 1000.0, False),
}
_FLAGS = ("do_resize", "do_sample_frames", "cap_pixels_per_frame", SPLITS)
NAMES = (*_NUMBERS, *_FLAGS)


@dataclass(frozen=True, slots=True)
class ImageOptions:
    min_pixels: int | None = None
    max_pixels: int | None = None
    resized: tuple[int, int] | None = None  # Requested (height, width).
    resize: bool = True
    longest_edge: int | None = None
    splits: bool | None = None  # Split into tiles; None: the checkpoint's setting.

    def unresized(self, size: tuple[int, int], factor: int, where: str) -> tuple[int, int]:
        """Return `size` (height, width) unchanged, because do_resize is False.

        Raises InvalidMedia if height or width is not a multiple of `factor`.
        """
        height, width = size
        if height % factor or width % factor:
            raise InvalidMedia(
                f"{where} is {width} x {height} pixels; without resizing both must be multiples of {factor}"
            )
        return size


@dataclass(frozen=True, slots=True)
class VideoOptions(ImageOptions):
    """A video's options. `min_pixels` and `max_pixels` count the pixels of one frame."""

    total_pixels: int | None = None  # Maximum number of pixels in all frames together.
    total_min_pixels: int | None = None
    cap_pixels_per_frame: bool | None = None  # None: the checkpoint's setting.
    fps: float | None = None  # Frames to sample per second.
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None  # Seconds.
    end: float | None = None
    source_fps: float | None = None  # Frames per second of the frames that were passed.
    sampled: bool | None = None  # True: the passed frames are already sampled, so all are used.


def image_options(values: Mapping[str, Any], where: str) -> ImageOptions:
    """Return the image options. Raises InvalidRequest for the first option outside its range. Unknown names
    are ignored.
    """
    return ImageOptions(**_common(_checked(values, where), where))


def video_options(values: Mapping[str, Any], where: str) -> VideoOptions:
    options = _checked(values, where)
    count = options.get("num_frames", options.get("nframes"))
    if count is not None and "fps" in options:
        raise InvalidRequest(f"{where}: fps and num_frames exclude each other; give one")
    keep = options.get("do_sample_frames")
    source_fps = options.get("raw_fps", options.get("sample_fps"))
    fps = options.get("fps")
    if keep is False and fps is not None:  # Without sampling, `fps` is the rate of the passed frames.
        source_fps, fps = source_fps or fps, None
    return VideoOptions(
        **_common(options, where),
        total_pixels=None if "total_pixels" not in options else int(options["total_pixels"]),
        total_min_pixels=None if "total_min_pixels" not in options else int(options["total_min_pixels"]),
        cap_pixels_per_frame=options.get("cap_pixels_per_frame"),
        fps=fps,
        num_frames=count,
        min_frames=options.get("min_frames"),
        max_frames=options.get("max_frames"),
        start=options.get("video_start"),
        end=options.get("video_end"),
        source_fps=source_fps,
        sampled=(True if source_fps else None) if keep is None else not keep,
    )


def check_known(values: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raise InvalidRequest for an option that the model does not support."""
    for name in NAMES:
        if values.get(name) is not None and name not in known:
            raise InvalidRequest(
                f"{where}: this model does not support {name}; leave it out, or use one of "
                f"{', '.join(sorted(known))}"
            )


def _common(options: dict[str, Any], where: str) -> dict[str, Any]:
    low, high = options.get("min_pixels"), options.get("max_pixels")
    if low is not None and high is not None and low > high:
        raise InvalidRequest(f"{where}: min_pixels {low} is larger than max_pixels {high}")
    height, width = options.get("resized_height"), options.get("resized_width")
    if (height is None) != (width is None):
        raise InvalidRequest(f"{where}: give resized_height and resized_width together")
    return {
        "min_pixels": low,
        "max_pixels": high,
        "resized": None if height is None else (height, width),
        "resize": options.get("do_resize", True),
        "longest_edge": options.get(LONGEST),
        "splits": options.get(SPLITS),
    }


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    checked = {}
    for name, (low, high, whole) in _NUMBERS.items():
        value = values.get(name)
        if value is None:
            continue
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not usable or not low <= value <= high or (whole and value != int(value)):
            kind = "a whole number" if whole else "a number"
            raise InvalidRequest(
                f"{where}: {name} must be {kind} from {low} to {high}, not {repr(value)[:60]}"
            )
        checked[name] = int(value) if whole else value
    for name in _FLAGS:
        if (value := values.get(name)) is not None:
            if not isinstance(value, bool):
                raise InvalidRequest(f"{where}: {name} must be true or false, not {repr(value)[:60]}")
            checked[name] = value
    return checked

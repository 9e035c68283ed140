"""Reads a video's frames for transformers' processor. The model's own video processor chooses the frames;
mmengine opens the container, enforces the limits and decodes the chosen frames.
"""

from collections.abc import Callable
from inspect import signature
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from mmengine.errors import InvalidMedia, InvalidRequest, in_one_line
from mmengine.processing.media.options import VideoOptions
from mmengine.processing.media.sources import Access
from mmengine.processing.media.video import Clip, Sample, open_clip, sample_clip, span_of

# Maximum number of pixels in all frames of a video. The processor resizes all frames together.
MAX_SOURCE_PIXELS = 2**27
# Used if neither the request nor the processor's settings choose frames: frames per second, and the maximum
# number of frames unless `max_frames` is set.
DEFAULT_FPS, DEFAULT_FRAMES = 2.0, 32
MAX_TOTAL = 2**31 - 1  # Maximum `total_num_frames` in metadata.
Arguments = dict[str, object]
_SHORT = 4  # If the model's sampling refuses a clip with at most this many frames, all frames are taken.
# Options of a processor's call that are not passed to `sample_frames`.
_NOT_SAMPLING = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")


class VideoProcessor(Protocol):
    """The part of transformers' video processors that this module uses."""

    valid_kwargs: type

    def sample_frames(self, **given: object) -> object: ...


class Frames(NamedTuple):
    """The chosen frames, uint8 [t, 3, h, w], and the metadata that transformers' VideoMetadata takes."""

    pixels: np.ndarray
    metadata: dict[str, object]


class HostedSampling:
    """Implements SamplingRules with a video processor of transformers."""

    def __init__(self, video_processor: VideoProcessor) -> None:
        self._processor = video_processor

    @property
    def do_sample_frames(self) -> bool:
        return bool(getattr(self._processor, "do_sample_frames", False))

    def sample(self, num_frames: int, fps: float, options: VideoOptions, where: str) -> np.ndarray:
        """See SamplingRules. The processor chooses among the frames between video_start and video_end."""
        from transformers.video_utils import VideoMetadata  # Slow to import.

        span = span_of(num_frames, fps, options, where)
        count = span.num_frames
        metadata = VideoMetadata(total_num_frames=count, fps=fps, duration=count / fps)
        given = self._arguments(count, fps, options, where)
        choose, wanted = self._processor.sample_frames, _number(given, "num_frames")
        if options.num_frames is not None and "num_frames" not in signature(choose).parameters:  # GLM-4V.
            return _uniform(count, min(options.num_frames, count)) + span.first
        try:
            found = np.asarray(choose(metadata=metadata, **given)).astype(np.int64)
            if not found.size:
                raise ValueError("it chooses no frame")
        except Exception as error:  # Processors may raise any exception for an unexpected length.
            rate = _number(given, "fps")
            if wanted is None and rate:  # For example, the clip is too short for this rate.
                wanted = min(max(1, int(count / fps * rate)), count)
            if count > _SHORT and wanted is None:
                raise InvalidMedia(
                    f"{where}: the model's own sampling refuses the video: {in_one_line(error, 200)}"
                ) from error
            found = _uniform(count, int(wanted or count))
        is_inside = found.ndim == 1 and found[0] >= 0 and found[-1] < count
        if not is_inside or (np.diff(found) < 0).any():
            raise InvalidMedia(f"{where}: the model's own sampling gives frames outside the video")
        return found + span.first

    def _arguments(self, count: int, fps: float, options: VideoOptions, where: str) -> Arguments:
        """Return the arguments of `sample_frames`: the processor's settings, and the request's options."""
        names = self._processor.valid_kwargs.__annotations__
        given = {name: getattr(self._processor, name, None) for name in names if name not in _NOT_SAMPLING}
        for name in ("min_frames", "max_frames"):
            value = getattr(options, name)
            if value is not None and name not in given:
                raise InvalidRequest(f"{where}: this model's sampling does not take {name}; leave it out")
            given |= {} if value is None else {name: value}
        wanted, has_count = options.num_frames, given.get("num_frames") is not None
        if options.fps is not None and has_count and given.get("fps") is None:
            wanted = max(1, int(count / fps * options.fps))  # `sample_frames` prefers num_frames to fps.
        elif options.fps is not None:
            given["fps"] = options.fps
        elif wanted is None and not (self.do_sample_frames or has_count or given.get("fps")):
            given["fps"] = DEFAULT_FPS
            if not given.get("max_frames") and count / fps * DEFAULT_FPS > DEFAULT_FRAMES:
                wanted = DEFAULT_FRAMES
        if wanted is not None:
            given |= {"num_frames": wanted, "fps": None}
        if number := _number(given, "num_frames"):
            given["num_frames"] = min(int(number), count)
        return given


def _number(given: Arguments, name: str) -> float | None:
    value = given.get(name)
    return value if isinstance(value, (int, float)) else None


def _uniform(count: int, wanted: int) -> np.ndarray:
    """Return `wanted` equally spaced indices into `count` frames."""
    return np.linspace(0, count - 1, wanted).round().astype(np.int64)


def read_frames(
    source: object,
    options: VideoOptions,
    access: Access,
    video_processor: VideoProcessor,
    check_size: Callable[[int, int, int], None],
    where: str,
) -> Frames:
    """Return a video's frames. `check_size`: called before decoding, with the frames' number, height and
    width. Raises InvalidMedia, InvalidRequest.
    """
    with open_clip(source, access, where) as (clip, indices):
        sample = sample_clip(clip, indices, options, HostedSampling(video_processor), where)
        count, (height, width) = len(sample.wanted), shrunk_size(clip.size, options.max_pixels)
        if count * height * width > MAX_SOURCE_PIXELS:
            raise InvalidMedia(
                f"{where}: {count} frames of {width} x {height} pixels have more than {MAX_SOURCE_PIXELS} "
                "pixels; lower fps, num_frames or max_pixels"
            )
        total = _stated_total(source, sample, where) or _total(clip, sample, options, where)
        check_size(count, height, width)
        pixels = np.empty((count, 3, height, width), np.uint8)
        for place, frame in enumerate(clip.frames(sample.wanted.tolist())):
            if frame.shape[:2] != (height, width):
                resized = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
                frame = np.asarray(resized)
            pixels[place] = frame.transpose(2, 0, 1)
        return Frames(pixels, _metadata(sample, total, (height, width)))


def shrunk_size(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """Return the (height, width) of an image or a frame, shrunk to at most `max_pixels` pixels."""
    height, width = size
    if max_pixels is None or height * width <= max_pixels:
        return size
    scale = (max_pixels / (height * width)) ** 0.5
    return max(1, int(height * scale)), max(1, int(width * scale))


def _stated_total(source: object, sample: Sample, where: str) -> int:
    """Return `total_num_frames` from the metadata for a list of frames, or 0."""
    metadata = source[1] if isinstance(source, tuple) and len(source) == 2 else None
    total = metadata.get("total_num_frames") if isinstance(metadata, dict) and sample.is_whole else None
    if total is None:
        return 0
    if isinstance(total, bool) or not isinstance(total, int) or not sample.indices[-1] < total <= MAX_TOTAL:
        raise InvalidMedia(
            f"{where}: total_num_frames of its metadata is {repr(total)[:60]}; it must be an integer above "
            f"the last of frames_indices, up to {MAX_TOTAL}"
        )
    return total


def _total(clip: Clip, sample: Sample, options: VideoOptions, where: str) -> int:
    """Return the number of frames from which the sample was chosen. For a list of frames, the mean distance
    between the frames' indices gives an estimate.
    """
    if not sample.is_whole:
        return span_of(clip.num_frames, sample.fps, options, where).num_frames
    indices = sample.indices.tolist()
    if len(indices) < 2:
        return len(indices)
    return max(1, round((indices[-1] - indices[0]) / (len(indices) - 1) * len(indices)))


def _metadata(sample: Sample, total: int, size: tuple[int, int]) -> dict[str, object]:
    return {
        "total_num_frames": total,
        "fps": sample.fps,
        "duration": None if sample.is_whole else total / sample.fps,
        "frames_indices": sample.indices.tolist(),
        "height": size[0],
        "width": size[1],
    }

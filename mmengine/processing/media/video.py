"""Converts a video file, or a sequence of frames, to patches and timestamps. Defines the interfaces for
sources of frames and for a model's sampling rules.

The timestamps equal those of transformers' video processors. The model's rules choose the frames to sample,
and the size of these frames. Only sampled frames are decoded to pixels, and each frame is resized
immediately.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmengine.errors import InvalidMedia
from mmengine.models.media_decoding import DecodedMedia
from mmengine.processing.media.formats import MAX_DECODED_PIXELS
from mmengine.processing.media.images import array_to_rgb, load_rgb, to_array, to_uint8
from mmengine.processing.media.options import VideoOptions
from mmengine.processing.media.patches import PatchSettings, patchify
from mmengine.processing.media.sources import Access, is_source
from mmengine.processing.media.video_file import VideoFile

DEFAULT_SOURCE_FPS = 24.0  # The rate that transformers assumes if the rate is unknown.
MAX_LISTED_FRAMES = 2**16
MAX_TAKEN_FRAMES = 2048
MAX_RESIZED_PIXELS = 2**26  # Maximum number of pixels in all sampled frames together.


class Clip(Protocol):
    """A source of frames: number, rate and size of the frames, and a method that yields chosen frames."""

    num_frames: int
    fps: float | None
    size: tuple[int, int]  # (height, width).

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield one frame, uint8 [h, w, 3], per index. The indices must ascend."""


class SamplingRules(Protocol):
    """A model's rules for sampling frames."""

    @property
    def do_sample_frames(self) -> bool:
        """Return whether frames that a caller passes are sampled by default."""

    def sample(self, num_frames: int, fps: float, options: VideoOptions, where: str) -> np.ndarray:
        """Return the indices of the frames to sample from a video with `num_frames` frames at `fps`: int64,
        ascending. Raises InvalidMedia.
        """


class VideoRules(SamplingRules, Protocol):
    """A model's rules for sampling and resizing videos."""

    @property
    def patches(self) -> PatchSettings: ...

    def frame_size(
        self, num_frames: int, size: tuple[int, int], options: VideoOptions, where: str
    ) -> tuple[int, int]:
        """Return the (height, width) to which `num_frames` frames of size `size` are resized. Raises
        InvalidMedia.
        """

    def resized(self, frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Resize uint8 [3, h, w] to uint8 [3, *size]."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The frames to take from a clip. `wanted`: their indices in the clip. `indices`: their indices in the
    original video, from which the clip may have been sampled. `is_whole`: whether all frames of the clip are
    taken, without sampling.
    """

    wanted: np.ndarray
    indices: np.ndarray
    fps: float
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A range of frames in a video, from which frames may be sampled."""

    first: int
    last: int

    @property
    def num_frames(self) -> int:
        return self.last - self.first + 1


def span_of(num_frames: int, fps: float, options: VideoOptions, where: str) -> Span:
    """Return the range of frames between video_start and video_end. Raises InvalidMedia for an empty
    range.
    """
    first, last = 0, num_frames - 1
    if options.start is not None:
        first = int(np.ceil(min(options.start, num_frames / fps) * fps))
    if options.end is not None:
        last = min(last, int(min(options.end, num_frames / fps) * fps))
    if first > last:
        raise InvalidMedia(
            f"{where}: there is no frame between video_start and video_end; the video has "
            f"{num_frames / fps:.2f} seconds"
        )
    return Span(first, last)


def load_video(
    source: Any,
    options: VideoOptions,
    rules: VideoRules,
    access: Access,
    check_length: Callable[[int], None],
    where: str,
) -> DecodedMedia:
    """Load a video as patches.

    `source`: a file, an array of frames, a list of frames, or a tuple (source, metadata).
    `check_length`: receives the number of embeddings, and is called before any frame is decoded.
    Raises InvalidMedia, and the exceptions that `check_length` raises.
    """
    with open_clip(source, access, where) as (clip, indices):
        sample = sample_clip(clip, indices, options, rules, where)
        return _take(clip, sample, options, rules, check_length, where)


def sample_clip(
    clip: Clip, indices: np.ndarray | None, options: VideoOptions, rules: SamplingRules, where: str
) -> Sample:
    """Choose the frames to take from a clip. `indices`: if the clip's frames are already sampled, their
    indices in the original video. Raises InvalidMedia.
    """
    fps = options.source_fps or clip.fps or DEFAULT_SOURCE_FPS
    sampled = options.sampled if options.sampled is not None else not rules.do_sample_frames
    is_file = isinstance(clip, VideoFile)
    if indices is not None or (sampled and not (is_file and options.sampled is None)):
        wanted = np.arange(clip.num_frames)
        sample = Sample(wanted, wanted if indices is None else indices, fps, is_whole=True)
    else:
        wanted = rules.sample(clip.num_frames, fps, options, where)
        sample = Sample(wanted, wanted, fps, is_whole=False)
    if len(wanted) > MAX_TAKEN_FRAMES:
        raise InvalidMedia(
            f"{where}: {len(wanted)} frames would be sampled; the limit is {MAX_TAKEN_FRAMES}: lower fps"
        )
    return sample


def _take(
    clip: Clip,
    sample: Sample,
    options: VideoOptions,
    rules: VideoRules,
    check_length: Callable[[int], None],
    where: str,
) -> DecodedMedia:
    """Return the patches of a clip's sampled frames."""
    wanted, times, patches = sample.wanted, sample.indices / sample.fps, rules.patches
    # If the caller sampled the frames, the number of frames does not give the video's duration.
    duration = float(times[-1]) if sample.is_whole else clip.num_frames / sample.fps
    height, width = rules.frame_size(len(wanted), clip.size, options, where)
    if len(wanted) * height * width > 2 * MAX_RESIZED_PIXELS:
        raise InvalidMedia(
            f"{where}: {len(wanted)} frames of {width} x {height} pixels are too many; lower fps"
        )
    temporal = patches.temporal_patch_size
    padding = -len(wanted) % temporal
    check_length((len(wanted) + padding) // temporal * (height * width // patches.factor**2))
    frames = np.empty((len(wanted) + padding, 3, height, width), np.uint8)
    for i, frame in enumerate(clip.frames(wanted.tolist())):
        frames[i] = rules.resized(np.ascontiguousarray(frame.transpose(2, 0, 1)), (height, width))
    frames[len(wanted) :] = frames[len(wanted) - 1]
    rows, grid = patchify(frames, patches)
    times = np.concatenate([times, np.repeat(times[-1:], padding)]).reshape(-1, temporal)
    middles = ((times[:, 0] + times[:, -1]) / 2).tolist()
    return DecodedMedia(rows, grid, tuple(middles), duration=duration)


@contextmanager
def open_clip(source: object, access: Access, where: str) -> Iterator[tuple[Clip, np.ndarray | None]]:
    """Yield the clip, and the indices of its frames in the original video. The indices are None if the
    metadata lack them. Raises InvalidMedia.
    """
    clip, indices = _open(source, access, where)
    try:
        yield clip, indices
    finally:
        if isinstance(clip, VideoFile):
            clip.close()


def _open(source: Any, access: Access, where: str) -> tuple[Clip, np.ndarray | None]:
    metadata = None
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], dict):
        source, metadata = source
    if is_source(source):
        return VideoFile(source, access, where), None
    clip: Clip
    if isinstance(source, (list, tuple)):
        clip = FrameList(source, access, where)
    else:
        clip = FrameArray(to_array(source, where), where)
    if metadata is None:
        return clip, None
    if metadata.get("fps") is not None:
        clip.fps = _positive(metadata["fps"], f"{where}: fps of its metadata")
    if metadata.get("frames_indices") is None:
        return clip, None
    indices = np.asarray(metadata["frames_indices"])
    if indices.shape != (clip.num_frames,) or indices.dtype.kind not in "ui" or (np.diff(indices) < 0).any():
        raise InvalidMedia(
            f"{where}: frames_indices of its metadata must be {clip.num_frames} ascending whole numbers"
        )
    return clip, indices.astype(np.int64)


def _positive(value: Any, what: str) -> float:
    usable = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not usable or not 0 < value <= 1e6:
        raise InvalidMedia(f"{what} must be a positive number, not {repr(value)[:60]}")
    return float(value)


@dataclass(slots=True)
class FrameList:
    """A Clip of frames given as images, paths, data: URLs or arrays. Only sampled frames are read."""

    images: Sequence[Any]
    access: Access
    where: str
    fps: float | None = None
    num_frames: int = field(init=False)
    size: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_frames = len(self.images)
        if not 1 <= self.num_frames <= MAX_LISTED_FRAMES:
            raise InvalidMedia(f"{self.where} has {self.num_frames} frames; give 1 to {MAX_LISTED_FRAMES}")
        self.size = self._load(0).size[::-1]

    def _load(self, index: int) -> Image.Image:
        return load_rgb(self.images[index], self.access, f"{self.where}, frame {index}")

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        for index in indices:
            image = self._load(index)
            if image.size[::-1] != self.size:
                raise InvalidMedia(
                    f"{self.where}, frame {index} is {image.size[0]} x {image.size[1]} pixels, but frame 0 "
                    f"is {self.size[1]} x {self.size[0]}; all must have the same size"
                )
            yield np.asarray(image)


class FrameArray:
    """A Clip of frames given as one array or tensor, [t, c, h, w] or [t, h, w, c]."""

    def __init__(self, array: np.ndarray, where: str) -> None:
        if array.ndim != 4:
            raise InvalidMedia(
                f"{where} has the shape {array.shape}; frames x 3 x height x width is expected"
            )
        if array.shape[1] in (1, 3, 4):
            height, width = array.shape[2:]
        else:
            height, width = array.shape[1:3]
        if height * width > MAX_DECODED_PIXELS or len(array) > MAX_LISTED_FRAMES:
            raise InvalidMedia(f"{where} of shape {array.shape} is too large")
        self.array, self.where = array, where
        self.num_frames, self.size = len(array), (height, width)
        self.fps: float | None = None

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        # Convert all frames together, so that all frames are scaled alike.
        for frame in to_uint8(self.array[list(indices)], self.where):
            yield array_to_rgb(frame, self.where)

"""Media settings of models with dynamic resolution ("smart resize").

Each side of an image is rounded to a multiple of `PatchSettings.factor`, the side length of the square of
pixels that becomes one embedding. The aspect ratio is nearly kept, and the pixel count is brought into a
range. Image sizes and video sampling follow transformers' processors for these models.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from mmengine.errors import ModelError
from mmengine.models.media_decoding import DecodedMedia
from mmengine.processing.media.options import LONGEST, SPLITS, ImageOptions, VideoOptions
from mmengine.processing.media.options import NAMES as OPTION_NAMES
from mmengine.processing.media.patches import PatchSettings, image_size, patchify, video_size
from mmengine.processing.media.resample import resize
from mmengine.processing.media.settings import (
    MAX_PIXELS,
    CheckLength,
    check_constants,
    read_integer,
    read_rate,
    read_section,
)
from mmengine.processing.media.sources import Access
from mmengine.processing.media.video import MAX_RESIZED_PIXELS as MAX_VIDEO_PIXELS
from mmengine.processing.media.video import load_video, span_of

MAX_RESIZED_PIXELS = 2**24  # Maximum pixels per image: 16,384 embeddings of 32 x 32 pixels each.
# A model folder must have these values, because this module resizes images bicubically, and encoders scale
# and normalise the pixels on their device.
_DONE = {"do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3}


@dataclass(frozen=True, slots=True)
class ImageSettings:
    min_pixels: int  # This limit and max_pixels count the resized image's pixels.
    max_pixels: int


@dataclass(frozen=True, slots=True)
class VideoSettings:
    min_pixels: int  # This limit and max_pixels count the pixels in all resized frames together.
    max_pixels: int
    min_frames: int
    max_frames: int
    fps: float  # Number of frames to sample per second.
    do_sample_frames: bool
    cap_pixels_per_frame: bool
    max_video_tokens: int  # Maximum embeddings per frame; ignored without cap_pixels_per_frame.


@dataclass(frozen=True, slots=True)
class GridSettings:
    """Implements MediaSettings and VideoRules for models with dynamic resolution."""

    patches: PatchSettings
    image: ImageSettings
    video: VideoSettings

    @property
    def options(self) -> frozenset[str]:
        return frozenset(OPTION_NAMES) - {LONGEST, SPLITS}

    @property
    def max_image_pixels(self) -> int:
        return self.image.max_pixels

    @property
    def do_sample_frames(self) -> bool:
        return self.video.do_sample_frames

    def describe(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def prepare_image(
        self, image: Image.Image, options: ImageOptions, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        height, width = self._image_size(image, options, where)
        check_length(height * width // self.patches.factor**2)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        planes = np.asarray(image).transpose(2, 0, 1)
        frames = np.broadcast_to(planes, (self.patches.temporal_patch_size, *planes.shape))
        return DecodedMedia(*patchify(frames, self.patches))

    def prepare_video(
        self, source: object, options: VideoOptions, access: Access, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        return load_video(source, options, self, access, check_length, where)

    def _image_size(self, image: Image.Image, options: ImageOptions, where: str) -> tuple[int, int]:
        factor = self.patches.factor
        width, height = image.size
        if not options.resize:
            return options.unresized((height, width), factor, where)
        if options.resized is not None:
            return image_size(*options.resized, factor, 1, MAX_RESIZED_PIXELS, where)
        low = self.image.min_pixels if options.min_pixels is None else options.min_pixels
        high = self.image.max_pixels if options.max_pixels is None else options.max_pixels
        high = min(high, MAX_RESIZED_PIXELS)
        return image_size(height, width, factor, min(low, high), high, where)

    def sample(self, num_frames: int, fps: float, options: VideoOptions, where: str) -> np.ndarray:
        """See VideoRules."""
        span = span_of(num_frames, fps, options, where)
        if options.num_frames is not None:
            count = min(options.num_frames, span.num_frames)
        else:
            count = int(span.num_frames / fps * (options.fps or self.video.fps))
            count = max(count, options.min_frames or self.video.min_frames)
            count = min(count, options.max_frames or self.video.max_frames, span.num_frames)
        return np.linspace(span.first, span.last, count).round().astype(np.int64)

    def frame_size(
        self, num_frames: int, size: tuple[int, int], options: VideoOptions, where: str
    ) -> tuple[int, int]:
        patches, settings = self.patches, self.video
        if not options.resize:
            return options.unresized(size, patches.factor, where)
        num_frames = max(num_frames, patches.temporal_patch_size)  # Too few frames are padded with copies.
        low, high = settings.min_pixels, options.total_pixels or settings.max_pixels
        low = options.total_min_pixels or low
        is_capped = options.cap_pixels_per_frame
        if settings.cap_pixels_per_frame if is_capped is None else is_capped:
            cap = settings.max_video_tokens * patches.factor**2
            high = max(min(cap, high // num_frames), int(low * 1.05)) * num_frames
        if options.max_pixels is not None:
            high = min(high, options.max_pixels * num_frames)
        if options.min_pixels is not None:
            low = options.min_pixels * num_frames
        low, high = min(low, high, MAX_VIDEO_PIXELS), min(high, MAX_VIDEO_PIXELS)
        if options.resized is not None:
            size = options.resized
            low, high = 1, MAX_VIDEO_PIXELS
        return video_size(num_frames, *size, patches, low, high, where)

    def resized(self, frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return resize(frame, *size)


def read_grids(folder: Path, defaults: GridSettings, normalisation: Mapping[str, object]) -> GridSettings:
    """Return the settings in a folder's files. Missing fields get their values from `defaults`.

    The patch sizes in the files must equal those in `defaults`. `normalisation`: maps fields such as
    image_mean to the only value that the model's encoder supports. Raises ModelError, which names the file
    and the field.
    """
    constants = {**normalisation, **_DONE, **asdict(defaults.patches)}
    image, image_path = read_section(folder, "image_processor", "preprocessor_config.json")
    video, video_path = read_section(
        folder, "video_processor", "video_preprocessor_config.json", optional=True
    )
    for values, path in ((image, image_path), (video, video_path)):
        check_constants(values, path, constants)
    image_range = _pixel_range(image, image_path, defaults.image)
    video_range = _pixel_range(video, video_path, defaults.video)
    fps = read_rate(video, video_path, "fps", defaults.video.fps)
    return GridSettings(
        patches=defaults.patches,
        image=ImageSettings(*image_range),
        video=VideoSettings(
            *video_range,
            min_frames=read_integer(video, video_path, "min_frames", defaults.video.min_frames),
            max_frames=read_integer(video, video_path, "max_frames", defaults.video.max_frames),
            fps=fps,
            do_sample_frames=video.get("do_sample_frames", defaults.video.do_sample_frames) is not False,
            cap_pixels_per_frame=video.get("cap_pixels_per_frame", defaults.video.cap_pixels_per_frame)
            is True,
            max_video_tokens=read_integer(
                video, video_path, "max_video_tokens", defaults.video.max_video_tokens
            ),
        ),
    )


def _pixel_range(
    values: Mapping[str, object], path: Path, defaults: ImageSettings | VideoSettings
) -> tuple[int, int]:
    size = values.get("size")
    size = dict(size) if isinstance(size, dict) else {}
    for name, old_name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if values.get(old_name) is not None:  # An older spelling, which has precedence.
            size[name] = values[old_name]
    low = read_integer(size, path, "shortest_edge", defaults.min_pixels, MAX_PIXELS)
    high = read_integer(size, path, "longest_edge", defaults.max_pixels, MAX_PIXELS)
    if low > high:
        raise ModelError(f"{path}: the smallest size {low} is larger than the largest {high}")
    return low, high

"""preprocessor_config.json and video_preprocessor_config.json, checked, over the defaults of a family.

Newer folders keep both in processor_config.json, as `image_processor` and `video_processor`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmengine.checkpoint.files import read_json
from mmengine.errors import ModelError

# Pixels are resized here, bicubically; encoders scale and normalise them on their device.
_DONE = {"do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3}
MAX_PIXELS = 2**28


@dataclass(frozen=True, slots=True)
class PatchSettings:
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    @property
    def factor(self) -> int:
        """Sides of a resized frame are multiples of it, in pixels."""
        return self.patch_size * self.merge_size

    def embeds(self, grid: tuple[int, int, int]) -> int:
        """Of one temporal patch of `grid`."""
        return grid[1] * grid[2] // self.merge_size**2


@dataclass(frozen=True, slots=True)
class ImageSettings:
    min_pixels: int  # of the resized image
    max_pixels: int


@dataclass(frozen=True, slots=True)
class VideoSettings:
    min_pixels: int  # of all resized frames together
    max_pixels: int
    min_frames: int
    max_frames: int
    fps: float  # frames taken a second
    do_sample_frames: bool
    cap_pixels_per_frame: bool
    max_video_tokens: int  # a frame, with cap_pixels_per_frame


@dataclass(frozen=True, slots=True)
class Settings:
    patches: PatchSettings
    image: ImageSettings
    video: VideoSettings

    def describe(self) -> str:
        """Canonical JSON, for fingerprints."""
        return json.dumps(asdict(self), sort_keys=True)


def read_settings(folder: Path, defaults: Settings, normalisation: Mapping[str, object]) -> Settings:
    """What the files say, and `defaults` where they are silent, whose patches they may not contradict.
    `normalisation`: fields such as image_mean, with the only values that the model's encoder computes with.
    Raises ModelError naming the file and the field."""
    constants = {**normalisation, **_DONE, **asdict(defaults.patches)}
    image, image_path = _section(folder, "image_processor", "preprocessor_config.json")
    video, video_path = _section(folder, "video_processor", "video_preprocessor_config.json", optional=True)
    for values, path in ((image, image_path), (video, video_path)):
        _check_constants(values, path, constants)
    image_range = _pixel_range(image, image_path, defaults.image)
    video_range = _pixel_range(video, video_path, defaults.video)
    fps = video.get("fps", defaults.video.fps)
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= 1000:
        raise ModelError(f"{video_path}: fps is {repr(fps)[:60]}; it must be a number up to 1000")
    return Settings(
        patches=defaults.patches,
        image=ImageSettings(*image_range),
        video=VideoSettings(
            *video_range,
            min_frames=_integer(video, video_path, "min_frames", defaults.video.min_frames),
            max_frames=_integer(video, video_path, "max_frames", defaults.video.max_frames),
            fps=float(fps),
            do_sample_frames=video.get("do_sample_frames", defaults.video.do_sample_frames) is not False,
            cap_pixels_per_frame=video.get("cap_pixels_per_frame", defaults.video.cap_pixels_per_frame)
            is True,
            max_video_tokens=_integer(video, video_path, "max_video_tokens", defaults.video.max_video_tokens),
        ),
    )


def _section(folder: Path, key: str, name: str, *, optional: bool = False) -> tuple[dict[str, Any], Path]:
    common = folder / "processor_config.json"
    if common.is_file():
        values = read_json(common).get(key)
        if isinstance(values, dict):
            return values, common
    path = folder / name
    if optional and not path.is_file():
        return {}, path
    return read_json(path), path


def _check_constants(values: dict[str, Any], path: Path, constants: Mapping[str, object]) -> None:
    for name, wanted in constants.items():
        if (value := values.get(name, wanted)) != wanted:
            raise ModelError(f"{path}: {name} is {repr(value)[:60]}; only {wanted} is supported here")


def _pixel_range(
    values: dict[str, Any], path: Path, defaults: ImageSettings | VideoSettings
) -> tuple[int, int]:
    size = values.get("size")
    size = dict(size) if isinstance(size, dict) else {}
    for name, old_name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if values.get(old_name) is not None:  # an older spelling, which wins where both are given
            size[name] = values[old_name]
    low = _integer(size, path, "shortest_edge", defaults.min_pixels, MAX_PIXELS)
    high = _integer(size, path, "longest_edge", defaults.max_pixels, MAX_PIXELS)
    if low > high:
        raise ModelError(f"{path}: the smallest size {low} is larger than the largest {high}")
    return low, high


def _integer(values: dict[str, Any], path: Path, name: str, default: int, high: int = 2**20) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelError(f"{path}: {name} is {repr(value)[:60]}; it must be an integer from 1 to {high}")
    return value

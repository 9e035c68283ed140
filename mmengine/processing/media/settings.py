"""What a family says of its images and videos: the port of the loader, and how a folder's files are read.

The files are preprocessor_config.json and video_preprocessor_config.json; newer folders keep both in
processor_config.json, as `image_processor` and `video_processor`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from mmengine.checkpoint.files import read_json
from mmengine.errors import ModelError
from mmengine.models.decoding import DecodedMedia
from mmengine.processing.media.options import ImageOptions, VideoOptions
from mmengine.processing.media.patches import PatchSettings
from mmengine.processing.media.sources import Access

MAX_PIXELS = 2**28
# Called with the embeddings that an item takes before its pixels are made; raises where they are too many.
CheckLength = Callable[[int], None]


class MediaSettings(Protocol):
    """A frozen dataclass of plain data, so that a process of its own can be told it as JSON, and what goes by
    it. Its module is imported there, and brings neither torch nor a tokenizer. `options`: those of a request
    that mean something here, of `mmengine.processing.media.options.NAMES`."""

    @property
    def patches(self) -> PatchSettings: ...

    @property
    def options(self) -> frozenset[str]: ...

    @property
    def max_image_pixels(self) -> int:
        """What an image is resized to at most, where nobody asks for another size."""

    def describe(self) -> str:
        """Canonical JSON, for fingerprints."""

    def prepare_image(
        self, image: Image.Image, options: ImageOptions, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        """Raises InvalidMedia, InvalidRequest."""

    def prepare_video(
        self, source: Any, options: VideoOptions, access: Access, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        """`source`: as `mmengine.processing.media.video.load_video` takes it. Raises as above."""


def read_section(folder: Path, key: str, name: str, *, optional: bool = False) -> tuple[dict[str, Any], Path]:
    """The object `key` of processor_config.json, else the file `name`, and where it was found. `optional`: {}
    where there is neither. Raises ModelError."""
    common = folder / "processor_config.json"
    if common.is_file():
        values = read_json(common).get(key)
        if isinstance(values, dict):
            return values, common
    path = folder / name
    if optional and not path.is_file():
        return {}, path
    return read_json(path), path


def check_constants(values: Mapping[str, object], path: Path, constants: Mapping[str, object]) -> None:
    """ModelError for a field that is there with another value."""
    for name, wanted in constants.items():
        if (value := values.get(name, wanted)) != wanted:
            raise ModelError(f"{path}: {name} is {repr(value)[:60]}; only {wanted} is supported here")


def read_integer(values: Mapping[str, object], path: Path, name: str, default: int, high: int = 2**20) -> int:
    """From 1 to `high`. Raises ModelError."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelError(f"{path}: {name} is {repr(value)[:60]}; it must be an integer from 1 to {high}")
    return value


def read_rate(values: Mapping[str, Any], path: Path, name: str, default: float) -> float:
    """Frames a second. Raises ModelError."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1000:
        raise ModelError(f"{path}: {name} is {repr(value)[:60]}; it must be a number up to 1000")
    return float(value)

"""A model's rules for images and videos: the protocol that the loader uses, and functions that read the rules
from a model folder.

The rules are in preprocessor_config.json and video_preprocessor_config.json. Newer folders have the contents
of both files in processor_config.json, as `image_processor` and `video_processor`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from mmengine.checkpoint.model_files import has_model_file, model_file, read_model_json
from mmengine.errors import ModelError
from mmengine.models.media_decoding import DecodedMedia
from mmengine.processing.media.options import ImageOptions, VideoOptions
from mmengine.processing.media.patches import PatchSettings
from mmengine.processing.media.sources import Access

MAX_PIXELS = 2**28
# A function that raises an error for too many embeddings. Called with an item's number of embeddings before
# the item is resized.
CheckLength = Callable[[int], None]


class MediaSettings(Protocol):
    """A model's rules for images and videos.

    An implementation is a frozen dataclass of plain data, because decoder processes receive the rules as
    JSON. The dataclass's module must import neither torch nor a tokenizer. `options`: the request options
    that the model supports, from `mmengine.processing.media.options.NAMES`.
    """

    @property
    def patches(self) -> PatchSettings: ...

    @property
    def options(self) -> frozenset[str]: ...

    @property
    def max_image_pixels(self) -> int:
        """Return the maximum height * width of a resized image, if the request sets no options."""

    def describe(self) -> str:
        """Return the rules as canonical JSON, for fingerprints."""

    def prepare_image(
        self, image: Image.Image, options: ImageOptions, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        """Convert an image to patches. Raises InvalidMedia, InvalidRequest."""

    def prepare_video(
        self, source: Any, options: VideoOptions, access: Access, check_length: CheckLength, where: str
    ) -> DecodedMedia:
        """Convert a video to patches. `source`: as in `mmengine.processing.media.video.load_video`. Raises
        InvalidMedia, InvalidRequest.
        """


def read_section(folder: Path, key: str, name: str, *, optional: bool = False) -> tuple[dict[str, Any], Path]:
    """Return the object `key` in processor_config.json. If there is no such object, return the contents of
    the file `name`.

    Also returns the path that was read. `optional`: return {} if neither the object nor the file exists.
    Raises ModelError.
    """
    common, path = "processor_config.json", model_file(folder, name)
    if has_model_file(folder, common):
        values = read_model_json(folder, common).get(key)
        if isinstance(values, dict):
            return values, folder / common
    if optional and not has_model_file(folder, name):
        return {}, path
    return read_model_json(folder, name), path


def check_constants(values: Mapping[str, object], path: Path, constants: Mapping[str, object]) -> None:
    """Raise ModelError for a field in `values` that differs from the constant with the same name."""
    for name, wanted in constants.items():
        if (value := values.get(name, wanted)) != wanted:
            raise ModelError(f"{path}: {name} is {repr(value)[:60]}; only {wanted} is supported here")


def read_integer(values: Mapping[str, object], path: Path, name: str, default: int, high: int = 2**20) -> int:
    """Return the integer in the field `name`, from 1 to `high`. Raises ModelError."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelError(f"{path}: {name} is {repr(value)[:60]}; it must be an integer from 1 to {high}")
    return value


def read_rate(values: Mapping[str, Any], path: Path, name: str, default: float) -> float:
    """Return the rate in the field `name`, in frames per second. Raises ModelError."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1000:
        raise ModelError(f"{path}: {name} is {repr(value)[:60]}; it must be a number up to 1000")
    return float(value)

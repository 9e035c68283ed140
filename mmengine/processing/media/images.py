"""Checks images and arrays of pixels, and converts them to RGB. Except in 16-bit grey images, each pixel has
the value that transformers gets from Pillow.

Transparent images are composited on white, EXIF rotation is applied, and Pillow converts CMYK. 16-bit grey is
scaled to 8 bits, while transformers clips the values at 255. An animation is refused, because an answer about
a single frame would silently ignore the other frames.
"""

import io
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import (
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from mmengine.errors import InvalidMedia
from mmengine.processing.media.formats import MAX_DECODED_PIXELS, FormatError, image_format
from mmengine.processing.media.sources import MAX_IMAGE_BYTES, Access, is_source, read_source

# Importing these plugins here keeps Pillow from loading its plugins for all formats.
PLUGINS = (
    PngImagePlugin,
    JpegImagePlugin,
    WebPImagePlugin,
    GifImagePlugin,
    BmpImagePlugin,
    TiffImagePlugin,
)
_TOO_MANY_PIXELS = f"has more than {MAX_DECODED_PIXELS} pixels; send a smaller one"
_UNKNOWN = "is not a supported image; use PNG, JPEG, WebP, GIF, BMP or TIFF"
_DAMAGED = "is damaged or cut short: its pixels cannot be decoded"
# Held while a PIL image is read, because requests may share an image, and Pillow reads files and EXIF lazily.
_SHARED = threading.Lock()
_ANIMATED = ("GIF", "WEBP", "PNG")  # MPO is left out, because it contains several views of one photo.
_BAND_PIXELS = 2**20
_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def load_rgb(source: Any, access: Access, where: str) -> Image.Image:
    """Convert bytes, a path, a data: URL, a PIL image, an array or a tensor to an RGB image. Raises
    InvalidMedia.
    """
    if isinstance(source, Image.Image):
        with _SHARED:
            return _converted(source, where)
    if is_source(source):
        return _decode(read_source(source, access, MAX_IMAGE_BYTES, where), where)
    return Image.fromarray(array_to_rgb(to_array(source, where), where))


def _decode(data: bytes, where: str) -> Image.Image:
    try:
        form = image_format(data)
    except FormatError as error:
        raise InvalidMedia(f"{where} {error}") from None
    if form is None:
        raise InvalidMedia(f"{where} {_UNKNOWN if data else 'is empty'}")
    try:
        image = Image.open(io.BytesIO(data), formats=(form,))
    except Image.DecompressionBombError:
        raise InvalidMedia(f"{where} {_TOO_MANY_PIXELS}") from None
    except Exception:  # Pillow's parsers raise nearly any exception on invalid bytes.
        raise InvalidMedia(f"{where} {_UNKNOWN}") from None
    with image:
        _check_size(image, where)
        _check_single(image, where)
        return _converted(image, where)


def _check_single(image: Image.Image, where: str) -> None:
    """Refuse an image with several frames. Frames are not counted, because Pillow would have to read all of
    them.
    """
    try:
        several = bool(getattr(image, "is_animated", False))
    except Exception:
        raise InvalidMedia(f"{where} {_DAMAGED}") from None
    if several and image.format in _ANIMATED:
        raise InvalidMedia(f"{where} is an animation; pass it as a video, or one frame")
    if several and image.format == "TIFF":
        raise InvalidMedia(f"{where} is a TIFF of several pages; pass each page as an image")


def _converted(image: Image.Image, where: str) -> Image.Image:
    _check_size(image, where)
    try:
        image.load()
        return _to_rgb(_upright(image))
    except InvalidMedia:
        raise
    except Exception:
        raise InvalidMedia(f"{where} {_DAMAGED}") from None


def _upright(image: Image.Image) -> Image.Image:
    """Return the image rotated by its EXIF orientation. Damaged EXIF data is ignored."""
    with suppress(Exception):
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return ImageOps.exif_transpose(image)
    return image


def _check_size(image: Image.Image, where: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidMedia(f"{where} has no pixels ({width} x {height})")
    if width * height > MAX_DECODED_PIXELS:
        raise InvalidMedia(f"{where} of {width} x {height} {_TOO_MANY_PIXELS}")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _SIXTEEN_BITS:
        return _scaled_grey(np.asarray(image), image.mode == "I").convert("RGB")
    if image.mode == "F":
        return Image.fromarray(array_to_rgb(np.asarray(image), "a floating-point image"))
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image.convert("RGB")


def _scaled_grey(values: np.ndarray, is_wide: bool) -> Image.Image:
    """Convert grey values [h, w] from 0 to 65535 to 8 bits.

    `is_wide`: whether the values have 32 bits. 32-bit values that are all at most 255 count as 8-bit values.
    """
    top = 255 if is_wide and values.max() <= 255 else 65535
    table = np.rint(np.arange(top + 1) * (255 / top)).astype(np.uint8)
    grey = np.empty(values.shape, np.uint8)
    for first, last in _bands(*values.shape):
        grey[first:last] = table[np.clip(values[first:last], 0, top)]
    return Image.fromarray(grey)


def _on_white(image: Image.Image) -> Image.Image:
    laid = Image.new("RGB", image.size)
    for first, last in _bands(image.height, image.width):
        band = image.crop((0, first, image.width, last)).convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        laid.paste(Image.alpha_composite(white, band).convert("RGB"), (0, first))
    return laid


def _bands(height: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, last row + 1) for each band of rows. Bands limit the memory for copies of a large
    image.
    """
    step = max(1, _BAND_PIXELS // width)
    return ((first, min(first + step, height)) for first in range(0, height, step))


def to_array(source: Any, where: str) -> np.ndarray:
    """Return an array unchanged, or convert an object with `.numpy()`, such as a torch tensor."""
    if not isinstance(source, np.ndarray):
        if not hasattr(source, "numpy"):
            raise InvalidMedia(
                f"{where} has the type {type(source).__name__}; pass a path, bytes, a data: URL, "
                "a PIL image or an array"
            )
        tensor = source.detach().cpu() if hasattr(source, "detach") else source
        try:
            source = np.asarray(tensor.numpy())
        except (TypeError, RuntimeError):  # bfloat16, for example, has no numpy type.
            raise InvalidMedia(f"{where} is a tensor that numpy cannot hold; pass it as uint8") from None
    if source.dtype.kind not in "buif" or source.size == 0:
        raise InvalidMedia(
            f"{where} is an array of {source.dtype} and shape {source.shape}, which holds no pixels"
        )
    return source


def array_to_rgb(array: np.ndarray, where: str) -> np.ndarray:
    """Convert [h, w], [h, w, c] or [c, h, w] with 1, 3 or 4 channels to uint8 [h, w, 3].

    If both the first and the last dimension have 1, 3 or 4 entries, the first is the channel dimension.
    Integers are 0 to 255 (uint16: 0 to 65535). Floats are whole numbers from 0 to 255 or fractions from 0 to
    1, as in transformers.
    """
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or (array.shape[0] not in (1, 3, 4) and array.shape[2] not in (1, 3, 4)):
        raise InvalidMedia(
            f"{where} has the shape {array.shape}; height x width x 3 (or 1, or 4) is expected"
        )
    if array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.shape[0] * array.shape[1] > MAX_DECODED_PIXELS:
        raise InvalidMedia(f"{where} has the shape {array.shape}, more than {MAX_DECODED_PIXELS} pixels")
    pixels = to_uint8(array, where)
    if pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    if pixels.shape[2] == 4:
        alpha = pixels[..., 3:] / 255
        pixels = np.rint(pixels[..., :3] * alpha + (1 - alpha) * 255).astype(np.uint8)
    return np.ascontiguousarray(pixels)


def to_uint8(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype == np.uint16:
        return np.rint(array * (255 / 65535)).astype(np.uint8)
    low, high = array.min(), array.max()
    if low >= 0 and high <= 255 and (array.dtype.kind in "ui" or np.array_equal(array, np.rint(array))):
        return array.astype(np.uint8)
    if low >= 0 and high <= 1:
        return np.rint(array * 255).astype(np.uint8)
    raise InvalidMedia(
        f"{where} has values from {low} to {high}; 0 to 255, or fractions 0 to 1, are expected"
    )

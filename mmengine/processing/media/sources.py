"""Reads the encoded bytes of images and videos from paths, data: URLs, base64 or bytes, up to a limit."""

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from mmengine.errors import HERE, FieldPath, InvalidMedia
from mmengine.processing.media import data_urls

MAX_MEDIA = 1024  # Maximum number of images and videos per request.
MAX_IMAGE_BYTES = 64 * 2**20
MAX_VIDEO_BYTES = 2**30
MAX_PATH_CHARS = 4096
MIN_BASE64_CHARS = 64
_BASE64_HEADS = (
    "iVBORw0KGgo",
    "/9j/",
    "R0lGOD",
    "UklGR",
    "Qk",
    "SUkq",
    "TU0A",
)  # First bytes of the image formats, in base64.


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or video in a prompt. `source`: None for a placeholder; the caller then passes the data
    separately. `where`: the item's name in errors.
    """

    modality: str
    source: Any
    options: Mapping[str, Any]
    where: str
    path: FieldPath = HERE


@dataclass(frozen=True, slots=True)
class Access:
    """A request's access to files: whether it may read files, and the folder for relative paths."""

    base_folder: Path | None = None
    local_files: bool = True


def is_source(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike, bytes, bytearray, memoryview))


def read_source(value: Any, access: Access, max_bytes: int, where: str) -> bytes:
    """Return the encoded bytes of a source. `where`: the item's name in errors, such as "image 0"."""
    if isinstance(value, str) and is_base64_image(value) and not _is_file(value, access):
        return decode_base64(value, max_bytes, where)
    with open_source(value, access, max_bytes, where) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise InvalidMedia(f"{where} cannot be read ({error.strerror or 'unknown reason'})") from None
    if len(data) > max_bytes:
        raise _too_large(max_bytes, where)
    return data


def open_source(value: Any, access: Access, max_bytes: int, where: str) -> BinaryIO:
    """Open the source as a byte stream, without reading a file into memory. Parameters: see read_source."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        if memoryview(value).nbytes > max_bytes:
            raise _too_large(max_bytes, where)
        return io.BytesIO(value)
    if isinstance(value, str):
        head = value[:16].lower()
        if data_urls.is_data_url(value):
            return io.BytesIO(_data_url(value, max_bytes, where))
        if head.startswith(("http://", "https://")):
            raise InvalidMedia(
                f'{where} is a URL; fetching URLs needs media_options={{"urls": True}} '
                "(--allow-media-urls). Or pass a path, a data: URL or the bytes"
            )
        if head.startswith(("ftp://", "s3://", "gs://")):
            raise InvalidMedia(
                f"{where} is a URL with an unsupported scheme; pass a path, a data: URL or the bytes"
            )
    return _open_file(value, access, max_bytes, where)


def is_base64_image(value: str) -> bool:
    """Return whether a string begins like a base64 image."""
    return len(value) >= MIN_BASE64_CHARS and value.startswith(_BASE64_HEADS)


def _is_file(value: str, access: Access) -> bool:
    """Return whether a string names an existing file that may be read."""
    is_name = access.local_files and len(value) <= MAX_PATH_CHARS and "\0" not in value
    return is_name and ((access.base_folder or Path()) / value).is_file()


def decode_base64(text: str, max_bytes: int, where: str) -> bytes:
    # Without line breaks, base64 text is 4/3 as long as the bytes. The limit of 3/2 leaves room for line
    # breaks.
    return _decode(data_urls.decode_base64, text, max_bytes * 3 // 2, max_bytes, where)


def _data_url(url: str, max_bytes: int, where: str) -> bytes:
    longest = data_urls.MAX_HEAD + max_bytes * (3 if "%" in url else 1) * 3 // 2
    return _decode(data_urls.decode_data_url, url, longest, max_bytes, where)


def _decode(decode: Callable[[str], bytes], text: str, longest: int, max_bytes: int, where: str) -> bytes:
    if len(text) > longest:
        raise _too_large(max_bytes, where)
    try:
        data = decode(text)
    except ValueError as error:
        raise InvalidMedia(f"{where} {error}") from None
    if len(data) > max_bytes:
        raise _too_large(max_bytes, where)
    return data


def keepable(value: Any, access: Access, max_bytes: int, where: str) -> bytes | Path | None:
    """Return the path for a source in a file, otherwise the encoded bytes. Return None for an image that the
    caller has decoded.
    """
    if not is_source(value):
        return None
    if isinstance(value, os.PathLike) or (isinstance(value, str) and not data_urls.is_data_url(value)):
        with open_source(value, access, max_bytes, where) as file:
            return Path(file.name).absolute()
    return read_source(value, access, max_bytes, where)


def _open_file(value: str | os.PathLike, access: Access, max_bytes: int, where: str) -> BinaryIO:
    if not access.local_files:
        raise InvalidMedia(f"{where} names a file, which is not allowed here; send it as a data: URL")
    text = os.fsdecode(os.fspath(value))
    shown = repr(text if len(text) <= 200 else text[:200] + "…")
    if len(text) > MAX_PATH_CHARS or "\0" in text:
        raise InvalidMedia(f"{where} is neither a path nor a data: URL: {shown}")
    try:
        if text[:7].lower() == "file://":
            text = text[7:] if os.path.exists(text[7:]) else unquote(text[7:])
        path = (access.base_folder or Path()) / text
        if not path.is_file():  # Refuse pipes and devices, which might never end.
            raise InvalidMedia(f"{where}: there is no file {shown}")
        if path.stat().st_size > max_bytes:
            raise _too_large(max_bytes, where)
        return path.open("rb")
    except OSError as error:
        raise InvalidMedia(f"{where}: cannot read {shown} ({error.strerror or 'unknown reason'})") from None
    except UnicodeError:
        raise InvalidMedia(f"{where}: {shown} is not a valid path") from None


def _too_large(max_bytes: int, where: str) -> InvalidMedia:
    return InvalidMedia(f"{where} is larger than {max_bytes // 2**20} MiB; send a smaller file")

"""Recognises image and video files by their first bytes, and checks the image sizes in these bytes.

Only two formats need this check: libwebp allocates an extended WebP's canvas before it reports the size, and
Pillow decodes run-length coded BMPs slowly. All other checks are left to the decoder, which runs in a process
with limits on memory and time (`processing/workers`).
"""

import struct
from typing import BinaryIO

MAX_DECODED_PIXELS = 64 * 2**20
MAX_RUN_PIXELS = 2**22  # Limit for run-length coded BMPs: Pillow decodes them in slow Python code.

_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"pnot", b"uuid", b"junk")


class FormatError(ValueError):
    """A refused file. The error's text has no subject: the caller puts the file's name before the text."""


def image_format(data: bytes) -> str | None:
    """Return Pillow's name for an image's format, or None for an unsupported format.

    Raises FormatError for an image whose header claims too many pixels.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        _check_webp(data)
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        _check_bmp(data)
        return "BMP"
    return "TIFF" if data.startswith(_TIFF) else None


def _check_webp(data: bytes) -> None:
    """Check the canvas size of an extended WebP, which libwebp allocates before Pillow reports the size."""
    if data[12:16] != b"VP8X" or len(data) < 30:
        return
    width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
    if width * height > MAX_DECODED_PIXELS:
        raise FormatError(
            f"of {width} x {height} has more than {MAX_DECODED_PIXELS} pixels; send a smaller one"
        )


def _check_bmp(data: bytes) -> None:
    if len(data) < 34 or struct.unpack_from("<I", data, 30)[0] not in (1, 2):  # no run-length compression
        return
    width, height = struct.unpack_from("<ii", data, 18)
    if abs(width * height) > MAX_RUN_PIXELS:
        raise FormatError(
            f"is a run-length coded BMP of {width} x {abs(height)} pixels, more than {MAX_RUN_PIXELS}; "
            "save it as PNG"
        )


def container_format(file: BinaryIO) -> str | None:
    """Return FFmpeg's name for a video file's demuxer, or None if the first bytes identify no format. The
    file's position changes.
    """
    file.seek(0)
    head = file.read(12)
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF") and head[8:] == b"AVI ":
        return "avi"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    return "mov" if head[4:8] in _MP4_BOXES else None

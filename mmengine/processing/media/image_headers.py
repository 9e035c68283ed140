"""Image containers, bounded before a decoder sees them: what headers claim, and how many parts there are.

Pillow walks over chunks, markers and blocks one by one in Python, unpacks texts and profiles that nobody
reads here, and gives a progressive JPEG a pass over all pixels for each scan. What an honest encoder writes
stays far below these limits. What is cut short is left to the decoder, which says so.
"""

import re
import struct
from collections.abc import Callable
from contextlib import suppress

from mmengine.processing.media.tiff_headers import HeaderError, check_exif, check_tiff, is_tiff

MAX_DECODED_PIXELS = 64 * 2**20
MAX_METADATA_BYTES = 16 * 2**20  # profiles, texts, EXIF, small pictures
MAX_EXIF_BYTES = 2**20
MAX_CHUNKS = 2**16  # of a PNG: 64 MiB in the 8 KiB that are usual have 8192
MAX_PACKED_CHUNKS = 16  # texts and profiles, each of which may unpack to 1 MiB
MAX_BLOCKS = 2**19  # of a GIF: 64 MiB in full blocks of 255 bytes have 263,000
MAX_EXTENSION_BLOCKS = 2**16
MAX_SEGMENTS = 1024  # of a JPEG before its pixels
MAX_STRAY_BYTES = 2**16  # between segments, where there should be none
MAX_TABLE_BYTES = 2**17  # Huffman, quantization
MAX_PHOTOSHOP_BYTES = 2**20
MAX_SCANS = 100
MAX_SCAN_PIXELS = 2**30
MAX_RIFF_CHUNKS = 1024
MAX_RUN_BYTES = 2**20  # of a BMP with run-length compression, which Pillow decodes in Python
MAX_RUN_PIXELS = 2**22

_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # what stands behind 0xff among pixels is left out
_ALONE = (0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE))  # markers without a length
_TABLES = (0xC4, 0xCC, 0xDB, 0xDD)
_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
_ANIMATION = "is an animation; pass it as a video, or one frame"


def check_headers(data: bytes) -> str | None:
    """Pillow's name of the format, None for none that is read. Raises HeaderError: why it is refused."""
    for form, magic, check in _FORMATS:
        if magic(data):
            with suppress(struct.error, IndexError):  # cut short: the decoder says so
                check(data)
            return form
    return None


def _png(data: bytes) -> None:
    place, count, packed, metadata = 8, 0, 0, 0
    while place + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, place)
        count += 1
        if name not in (b"IDAT", b"fdAT"):
            metadata += length
        packed += name in (b"zTXt", b"iTXt", b"iCCP")
        if count > MAX_CHUNKS:
            raise HeaderError(f"has more than {MAX_CHUNKS} chunks; save it again as a plain PNG or JPEG")
        if packed > MAX_PACKED_CHUNKS:
            raise HeaderError(f"has more than {MAX_PACKED_CHUNKS} packed texts and profiles; save it without")
        _check_metadata(metadata)
        if name == b"eXIf":
            _check_exif(data[place + 8 : place + 8 + length])
        if name == b"IEND":
            return
        place += 12 + length


def _gif(data: bytes) -> None:
    place = 13 + _palette_bytes(data[10])
    images = blocks = extensions = 0
    while (kind := data[place]) != 0x3B:
        blocks += 1
        if kind == 0x2C:
            images += 1
            if images > 1:
                raise HeaderError(_ANIMATION)
            place += 11 + _palette_bytes(data[place + 9])
        elif kind == 0x21:
            place += 2
        else:  # Pillow passes over it
            place += 1
        first = blocks
        while kind in (0x2C, 0x21) and (length := data[place]):
            place += 1 + length
            blocks += 1
            if blocks > MAX_BLOCKS:
                break
        place += kind in (0x2C, 0x21)
        extensions += blocks - first + 1 if kind != 0x2C else 0
        if blocks > MAX_BLOCKS or extensions > MAX_EXTENSION_BLOCKS:
            raise HeaderError(
                f"has more than {MAX_BLOCKS} blocks or {MAX_EXTENSION_BLOCKS} beside pixels; save it again"
            )


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 128 else 0


def _jpeg(data: bytes) -> None:
    place, found = 2, _Segments()
    while (place := _next_segment(data, place, found)) and place + 4 <= len(data):
        marker, length = data[place + 1], struct.unpack_from(">H", data, place + 2)[0]
        found.add(marker, data[place + 4 : place + 2 + length])
        place += 2 + length
    if found.exif:
        _check_exif(b"".join(found.exif))


def _next_segment(data: bytes, place: int, found: "_Segments") -> int:
    """The place of the next marker that has a length; 0: there is none before the end of the picture."""
    while match := _NEXT_MARKER.search(data, place):
        marker = data[match.start() + 1]
        found.stray += 2 * (marker in _ALONE)
        if not found.scans:  # behind the first scan Pillow leaves the walk to libjpeg
            found.stray += match.start() - place
        if found.stray > MAX_STRAY_BYTES:
            raise HeaderError(f"has more than {MAX_STRAY_BYTES} bytes between its segments; save it again")
        if marker not in _ALONE:
            return match.start()
        if marker == 0xD9 and found.scans:
            break
        place = match.end()
    return 0


class _Segments:
    """What the segments of a JPEG hold, counted."""

    def __init__(self) -> None:
        self.scans = self.stray = 0
        self.exif: list[bytes] = []
        self._count = self._tables = self._metadata = self._photoshop = self._pixels = 0

    def add(self, marker: int, body: bytes) -> None:
        self._count += 1
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", body, 1)
            self._pixels = max(self._pixels, height * width)
        elif marker == 0xDA:
            self.scans += 1
        elif marker in _TABLES:
            self._tables += len(body)
        else:
            self._metadata += len(body)
            self._photoshop += len(body) if marker == 0xED else 0
            if marker == 0xE1 and body.startswith(b"Exif\0\0"):
                self.exif.append(body if not self.exif else body[6:])
        self._check()

    def _check(self) -> None:
        if self._count > MAX_SEGMENTS or self._tables > MAX_TABLE_BYTES:
            raise HeaderError(
                f"has more than {MAX_SEGMENTS} segments, or {MAX_TABLE_BYTES} bytes of tables; save it again"
            )
        if self._photoshop > MAX_PHOTOSHOP_BYTES:
            raise HeaderError(f"has more than {MAX_PHOTOSHOP_BYTES} bytes of Photoshop's; save it without")
        _check_metadata(self._metadata)
        if self.scans > MAX_SCANS or self.scans * self._pixels > MAX_SCAN_PIXELS:
            raise HeaderError(
                f"is a progressive JPEG of {self.scans} scans or more, too many for its size; save it again"
            )


def _webp(data: bytes) -> None:
    place = 12
    frames = chunks = 0
    while place + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, place)
        chunks += 1
        frames += name == b"ANMF"
        if frames > 1:
            raise HeaderError(_ANIMATION)
        if chunks > MAX_RIFF_CHUNKS:
            raise HeaderError(f"has more than {MAX_RIFF_CHUNKS} chunks; save it again as WebP or PNG")
        if name == b"VP8X":  # libwebp makes room for all of it before Pillow says how large it is
            width, height = (
                1 + int.from_bytes(data[place + at : place + at + 3], "little") for at in (12, 15)
            )
            if width * height > MAX_DECODED_PIXELS:
                raise HeaderError(
                    f"of {width} x {height} has more than {MAX_DECODED_PIXELS} pixels; send a smaller one"
                )
        elif name == b"EXIF":
            _check_exif(data[place + 8 : place + 8 + length])
        elif name in (b"ICCP", b"XMP "):
            _check_metadata(length)
        place += 8 + length + length % 2


def _bmp(data: bytes) -> None:
    if struct.unpack_from("<I", data, 14)[0] < 40 or struct.unpack_from("<I", data, 30)[0] not in (1, 2):
        return
    width, height = struct.unpack_from("<ii", data, 18)
    if len(data) > MAX_RUN_BYTES or abs(width * height) > MAX_RUN_PIXELS:
        raise HeaderError(
            f"is a run-length coded BMP of more than {MAX_RUN_BYTES} bytes or {MAX_RUN_PIXELS} pixels; "
            "save it as PNG"
        )


def _check_metadata(num_bytes: int) -> None:
    if num_bytes > MAX_METADATA_BYTES:
        raise HeaderError(f"has more than {MAX_METADATA_BYTES} bytes beside its pixels; save it without them")


def _check_exif(data: bytes) -> None:
    if len(data) > MAX_EXIF_BYTES:
        raise HeaderError(f"has more than {MAX_EXIF_BYTES} bytes of EXIF; save it without them")
    check_exif(data)


_FORMATS: tuple[tuple[str, Callable[[bytes], bool], Callable[[bytes], None]], ...] = (
    ("PNG", lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), _png),
    ("JPEG", lambda data: data.startswith(b"\xff\xd8\xff"), _jpeg),
    ("WEBP", lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", _webp),
    ("GIF", lambda data: data.startswith((b"GIF87a", b"GIF89a")), _gif),
    ("BMP", lambda data: data.startswith(b"BM"), _bmp),
    ("TIFF", is_tiff, check_tiff),
)

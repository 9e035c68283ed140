"""Generates hostile images and videos from seeds."""

import io
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache

import av
import numpy as np
from PIL import Image

SIDES = (0, 1, 2, 63, 64, 1000, 16384, 32767, 65535)
LENGTHS = (0, 1, 4, 255, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * 7919 + height)
    return Image.fromarray(noise.integers(0, 255, (height, width, 3), np.uint8))


@cache
def image_of(kind: str) -> bytes:
    """Return a small valid picture."""
    buffer = io.BytesIO()
    picture(48, 40).save(buffer, kind)
    return buffer.getvalue()


@cache
def animation_of(kind: str) -> bytes:
    buffer = io.BytesIO()
    frames = [picture(24, 16 + k).resize((24, 16)) for k in range(3)]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


@cache
def video_of(container: str, codec: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for k in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 30 * k, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


# PNG


@cache
def _zeros(count: int) -> bytes:
    return zlib.compress(bytes(count), 1)


def _chunk(name: bytes, data: bytes, length: int | None = None) -> bytes:
    return (
        struct.pack(">I", len(data) if length is None else length)
        + name
        + data
        + struct.pack(">I", zlib.crc32(name + data))
    )


def png(rng: random.Random) -> bytes:
    width, height = (rng.choice((64, *SIDES)) for _ in range(2))
    depth, colour = rng.choice(((8, 2), (8, 6), (16, 0), (1, 0), (8, 3), (16, 6), (7, 9)))
    chunks = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, rng.choice((0, 0, 1))))
    ]
    for _ in range(rng.choice((0, 0, 1, 3, 400))):
        bomb = _zeros(rng.choice((10, 10**4, 10**6)))
        chunks.append(
            rng.choice(
                (
                    _chunk(b"zTXt", b"a\0\0" + bomb),
                    _chunk(b"iTXt", b"a\0\1\0\0\0" + bomb),
                    _chunk(b"iCCP", b"a\0\0" + bomb),
                    _chunk(b"PLTE", rng.randbytes(rng.choice((3, 768, 4000)))),
                    _chunk(b"acTL", struct.pack(">II", rng.choice(LENGTHS), 0)),
                    _chunk(b"eXIf", _tiff_body(rng)),
                    _chunk(b"tRNS", rng.randbytes(6)),
                    _chunk(b"tEXt", b"x", rng.choice(LENGTHS)),
                )
            )
        )
    body = _zeros(rng.choice((0, 64 * 65, 64 * 193, 10**5, 10**6)))
    chunks += [_chunk(b"IDAT", body)] * rng.choice((1, 1, 2, 50))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + _chunk(b"IEND", b"")


def png_bomb(rng: random.Random) -> bytes:
    """Return a small file that decodes to many pixels, up to the largest accepted picture."""
    width, height = rng.choice(((3000, 3000), (8000, 8000), (32000, 2000), (8193, 8192)))
    rows = _zeros(((width + 7) // 8 + 1) * height)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


# JPEG


def jpeg(rng: random.Random) -> bytes:
    data = bytearray(image_of("JPEG"))
    places = [at for at in range(2, len(data) - 9) if data[at] == 0xFF and 0xC0 <= data[at + 1] <= 0xFE]
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.choice(places)
        struct.pack_into(">H", data, at + 2, rng.choice((0, 1, 2, 17, 65535)))
    start = data.find(b"\xff\xc0")
    if start > 0 and rng.random() < 0.7:
        struct.pack_into(">HH", data, start + 5, *(rng.choice(SIDES) for _ in range(2)))
    if rng.random() < 0.5:
        body = rng.choice(
            (b"Exif\0\0" + _tiff_body(rng), b"ICC_PROFILE\0\1\1" + rng.randbytes(40), rng.randbytes(90))
        )
        segment = bytes((0xFF, rng.randrange(0xE0, 0xF0))) + struct.pack(">H", len(body) + 2) + body
        data[2:2] = segment * rng.choice((1, 1, 300))
    if rng.random() < 0.3:  # repeated scans
        scan = data[data.find(b"\xff\xda") : -2]
        data[-2:-2] = scan * rng.choice((2, 60))
    return bytes(data)


# TIFF, which is also the format of EXIF data


def _tiff_body(rng: random.Random, pages: int = 1) -> bytes:
    order = rng.choice("<>")
    body = bytearray((b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8))
    for page in range(pages):
        at = len(body)
        tags = {
            256: rng.choice((64, *SIDES)),
            257: rng.choice((64, *SIDES)),
            258: 8,
            259: rng.choice((1, 5, 7, 8, 32773)),
            262: rng.choice((0, 1, 2, 3, 5)),
            273: rng.choice((8, *LENGTHS)),
            277: rng.choice((1, 3, 4, 65535)),
            278: rng.choice((1, *SIDES)),
            279: rng.choice(LENGTHS),
            330: at,
            34665: rng.choice((8, at, 2**31)),
        }
        body += struct.pack(order + "H", rng.choice((len(tags), len(tags), 65535)))
        for tag, value in tags.items():
            kind, count = rng.choice(((4, 1), (4, 1), (3, 2**28), (5, 10**6), (99, 1)))
            body += struct.pack(order + "HHII", tag, kind, count, value & 0xFFFFFFFF)
        following = len(body) + 4 if page + 1 < pages else rng.choice((0, 8, at, 2**32 - 1))
        body += struct.pack(order + "I", following)
    return bytes(body)


def tiff(rng: random.Random) -> bytes:
    return _tiff_body(rng, rng.choice((1, 1, 2, 50)))


def tiff_pages(rng: random.Random) -> bytes:
    """Return a TIFF file with many valid small pages."""
    return b"".join(_small_pages(rng.choice((100, 2000, 4000))))


@cache
def _small_pages(count: int) -> list[bytes]:
    tags = ((256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 1))
    size = 2 + 12 * len(tags) + 4
    parts = [b"II*\0" + struct.pack("<I", 8)]
    for page in range(count):
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        following = 8 + (page + 1) * size if page + 1 < count else 0
        parts.append(struct.pack("<H", len(tags)) + entries + struct.pack("<I", following))
    return parts


# GIF, WebP, BMP


def gif(rng: random.Random) -> bytes:
    width, height = (rng.choice((16, *SIDES)) for _ in range(2))
    data = bytearray(b"GIF89a" + struct.pack("<HHBBB", width, height, rng.choice((0, 0x87, 0xF7)), 0, 0))
    data += rng.randbytes(768 if data[10] & 0x80 else 0)
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, rng.choice(SIDES), rng.choice(SIDES), 0)
    frame += bytes((rng.choice((2, 8, 12, 255)),)) + b"\x10" + rng.randbytes(16) + b"\0"
    comment = b"\x21\xfe" + b"\xff" + rng.randbytes(255) + b"\0"
    for _ in range(rng.choice((1, 2, 2000))):
        data += rng.choice((frame, frame, comment))
    return bytes(data) + rng.choice((b"", b";"))


def webp(rng: random.Random) -> bytes:
    data = bytearray(image_of("WEBP"))
    struct.pack_into("<I", data, rng.choice((4, 16)), rng.choice((len(data) - 8, *LENGTHS)))
    if rng.random() < 0.5:
        canvas = struct.pack("<I", rng.randrange(256)) + rng.randbytes(6)
        data[12:12] = b"VP8X" + struct.pack("<I", 10) + canvas
    if rng.random() < 0.3:
        struct.pack_into("<HH", data, min(26, len(data) - 4), *(rng.choice(SIDES) & 0x3FFF for _ in range(2)))
    return bytes(data)


def bmp(rng: random.Random) -> bytes:
    data = bytearray(image_of("BMP"))
    for at, kind, values in (
        (10, "<I", LENGTHS),
        (14, "<I", (12, 40, 64, 124, 2**31)),
        (18, "<i", (*SIDES, -1, -(2**31))),
    ):
        if rng.random() < 0.4:
            struct.pack_into(kind, data, at, rng.choice([v for v in values if kind == "<I" or v < 2**31]))
    if rng.random() < 0.4:
        struct.pack_into("<i", data, 22, rng.choice((*SIDES, -5, -(2**31))))
    struct.pack_into("<HI", data, 28, rng.choice((1, 4, 8, 16, 24, 32, 99)), rng.choice((0, 1, 2, 3, 9)))
    return bytes(data)


# Video containers


def _boxes(data: bytes, start: int = 0, end: int | None = None) -> list[int]:
    """Return where the boxes of an MP4 begin, including nested boxes."""
    found, end = [], len(data) if end is None else end
    while start + 8 <= end:
        size = struct.unpack_from(">I", data, start)[0]
        found.append(start)
        if data[start + 4 : start + 8] in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"):
            found += _boxes(data, start + 8, min(start + size, end))
        if size < 8:
            break
        start += size
    return found


def mp4(rng: random.Random) -> bytes:
    data = bytearray(video_of(*rng.choice((("mp4", "mpeg4"), ("mp4", "libx264"), ("mov", "mpeg4")))))
    boxes = _boxes(bytes(data))
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.choice(boxes)
        what = rng.randrange(4)
        if what == 0:  # the box's size
            struct.pack_into(">I", data, at, rng.choice(LENGTHS))
        elif what == 1:  # a value in the box, such as an entry count, a duration or a width
            place = min(at + 8 + 4 * rng.randrange(6), len(data) - 4)
            struct.pack_into(">I", data, place, rng.choice(LENGTHS))
        elif what == 2:  # the box's type
            data[at + 4 : at + 8] = rng.choice((b"free", b"moov", b"stsz", b"elst", b"trak", b"\0\0\0\0"))
        else:  # nested boxes
            data += b"".join(struct.pack(">I", 8 * k) + b"moov" for k in range(rng.choice((5, 3000)), 0, -1))
    return bytes(data)


def webm(rng: random.Random) -> bytes:
    data = bytearray(video_of("webm", "libvpx"))
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(4, min(len(data), 400))
        data[at] = rng.choice((0x01, 0x80, 0xFF, 0x08, 0x1A, rng.randrange(256)))
    if rng.random() < 0.3:
        at = data.find(b"\x1f\x43\xb6\x75")
        data[at:at] = (
            b"\xec\x01" + rng.randbytes(7) + b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff" * 200
        )
    return bytes(data)


# Damage to any file


def damaged(rng: random.Random, data: bytes) -> bytes:
    what = rng.randrange(5)
    if what == 0:
        return data[: rng.randrange(len(data) + 1)]
    if what == 1:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 4, 64))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if what == 2:
        at, size = rng.randrange(len(data)), rng.choice((1, 8, 100))
        return data[:at] + data[at : at + size] * rng.choice((2, 50)) + data[at:]
    if what == 3:
        return data + rng.randbytes(rng.choice((1, 1000)))
    return data


IMAGES: dict[str, Callable[[random.Random], bytes]] = {
    "png": png,
    "jpeg": jpeg,
    "tiff": tiff,
    "tiff pages": tiff_pages,
    "gif": gif,
    "webp": webp,
    "bmp": bmp,
    "whole": lambda rng: image_of(rng.choice(("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"))),
    "animation": lambda rng: animation_of(rng.choice(("GIF", "PNG", "WEBP", "TIFF"))),
    "noise": lambda rng: (
        rng.choice((b"", b"BM", b"RIFF", b"\xff\xd8\xff")) + rng.randbytes(rng.randrange(200))
    ),
}
VIDEOS: dict[str, Callable[[random.Random], bytes]] = {
    "mp4": mp4,
    "webm": webm,
    "gif as a video": gif,
    "picture as a video": lambda rng: image_of("PNG"),
}
BOMBS: dict[str, Callable[[random.Random], bytes]] = {"png bomb": png_bomb}


def hostile_file(
    rng: random.Random, makers: dict[str, Callable[[random.Random], bytes]]
) -> tuple[str, bytes]:
    """Return a random file's kind and bytes."""
    kind = rng.choice(list(makers))
    data = makers[kind](rng)
    for _ in range(rng.choice((0, 0, 1, 2))):
        data = damaged(rng, data) if data else data
    return kind, data


def warm_up() -> None:
    """Generate the shared data once, so that later calls are cheap."""
    for container, codec in (("mp4", "mpeg4"), ("mp4", "libx264"), ("mov", "mpeg4"), ("webm", "libvpx")):
        video_of(container, codec)
    rng = random.Random(0)
    for makers in (IMAGES, VIDEOS, BOMBS):
        for make in makers.values():
            for _ in range(20):
                make(rng)

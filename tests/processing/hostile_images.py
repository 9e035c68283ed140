"""Creates image files that cost far more time or memory to decode than their size suggests. Each
function's argument `size` is the file's approximate size in bytes.
"""

import io
import struct
import zlib

from PIL import Image

MB = 2**20


def encoded(form, size=(16, 16), mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, size).save(file, form, **options)
    return file.getvalue()


def tiff(entries, following=0, more=b""):
    """Return a little-endian TIFF with a directory and the bytes `more`. `entries`: the directory's entries
    (tag, type, count, value or offset). `following`: the next directory's offset.
    """
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    body = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return head + body + struct.pack("<I", following) + more


def grey_tiff(*entries, width=16, height=16, following=0, more=b"\0" * 256):
    """Return a grey TIFF. `entries`: additional or changed tags. `more`: the pixels, and further bytes."""
    plain = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1)}
    plain |= {273: (4, 1, 0), 277: (3, 1, 1), 278: (4, 1, height), 279: (4, 1, width * height)}
    plain |= {entry[0]: entry[1:] for entry in entries}
    behind = 8 + 2 + 12 * len(plain) + 4
    if plain[273][1] == 1:
        plain[273] = (4, 1, behind)
    return tiff([(tag, *entry) for tag, entry in plain.items()], following, more)


def tiff_pages(size):
    """Return a TIFF with many pages that share the same pixels. A page has 114 bytes."""
    count = size // 114
    page, pixels = grey_tiff()[8:122], 8 + 114 * count
    assert struct.unpack("<H", page[:2]) == (9,)
    pages = bytearray(b"II*\0\x08\0\0\0")
    for number in range(count):
        here = page.replace(struct.pack("<HHII", 273, 4, 1, 122), struct.pack("<HHII", 273, 4, 1, pixels))
        following = 8 + 114 * (number + 1) if number + 1 < count else 0
        pages += here[:-4] + struct.pack("<I", following)
    return bytes(pages) + b"\0" * 256


def tiff_tags_share_data(size):
    """Return a TIFF with 4000 tags. The data of each tag span the whole file."""
    tags = [(30_000 + number, 7, size, 8) for number in range(4000)]
    return grey_tiff(*tags, more=b"\0" * size)


def tiff_fractions(size):
    """Return a TIFF whose resolution tag fills the file with fractions."""
    return grey_tiff((282, 5, size // 8 - 32, 200), more=b"\1\0\0\0" * (size // 4))


def tiff_strips(size):
    """Return a TIFF with far more strips than rows."""
    return grey_tiff(
        (273, 4, size // 4 - 64, 200),
        (278, 4, 1, 1),
        (279, 4, size // 4 - 64, 200),
        more=b"\x20\1\0\0" * (size // 4),
    )


def tiff_exif_fractions(size):
    """Return a TIFF whose EXIF directory has a tag that fills the file with fractions."""
    behind = 8 + 2 + 12 * 10 + 4
    inner = struct.pack("<H", 1) + struct.pack("<HHIII", 40_000, 5, size // 8, behind, 0)
    return grey_tiff((34665, 4, 1, behind), more=inner + b"\1\0\0\0" * (size // 4))


def tiff_shared_tags(size):
    """Return a TIFF with 100 tags. The data of each tag span the whole file."""
    return grey_tiff(*((30_000 + number, 7, size, 8) for number in range(100)), more=b"\0" * size)


def tiff_shared_strips(size):
    """Return a TIFF with 4096 strips. Each strip spans the whole file. FillOrder 2 makes the decoder copy
    each strip.
    """
    count, behind = 4096, 8 + 2 + 12 * 10 + 4
    offsets, counts = struct.pack("<I", 8) * count, struct.pack("<I", size) * count
    return grey_tiff(
        (259, 3, 1, 32773),
        (266, 3, 1, 2),
        (273, 4, count, behind),
        (278, 4, 1, 1),
        (279, 4, count, behind + len(offsets)),
        height=count,
        more=offsets + counts + b"\0" * size,
    )


def tiff_directories(size):
    """Return a TIFF with a directory that is also its own EXIF and GPS directory."""
    return grey_tiff((34665, 4, 1, 8), (34853, 4, 1, 8), more=b"\0" * size)


def gif_frames(size):
    """Return a GIF with many frames of a single pixel (about 15 bytes each)."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + frame * (size // len(frame)) + b";"


def _gif(extensions):
    return encoded("GIF")[:-1].replace(b",\0\0\0\0", extensions + b",\0\0\0\0", 1) + b";"


def gif_comments(size):
    return _gif(b"!\xfe\x01a\0" * (size // 5))


def gif_extension_blocks(size):
    return _gif(b"!\xff\x0bNETSCAPE2.0" + b"\x01a" * (size // 2) + b"\0")


def gif_tail_blocks(size):
    """Return a GIF with one-byte blocks after the picture. A search for further frames reads all blocks."""
    return encoded("GIF")[:-2] + b"\x01a" * (size // 2) + b"\0;"


def chunk(name, data=b""):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(chunks, **options):
    """Return a PNG with `chunks` after the header."""
    data = encoded("PNG", **options)
    return data[:33] + chunks + data[33:]


def png_chunks(size):
    return _png(chunk(b"prVt") * (size // 12))


def png_small_data(size):
    """Return a PNG with many empty data chunks before its pixels."""
    data = encoded("PNG", (64, 64))
    return data[:33] + chunk(b"IDAT") * (size // 12) + data[33:]


def png_texts(size):
    """Return a PNG with compressed texts. Each text unpacks to a megabyte."""
    packed = zlib.compress(b"a" * (MB - 100), 9)
    one = len(packed) + 20
    return _png(b"".join(chunk(b"zTXt", b"k%d\0\0" % i + packed) for i in range(min(63, size // one))))


def png_profiles(size):
    """Return a PNG with colour profiles. Each profile unpacks to a megabyte."""
    one = chunk(b"iCCP", b"k\0\0" + zlib.compress(b"a" * (MB - 100), 9))
    return _png(one * (size // len(one)))


def _segment(marker, data=b""):
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(data)) + data


def _jpeg(segments, **options):
    data = encoded("JPEG", **options)
    return data[:2] + segments + data[2:]


def jpeg_comments(size):
    return _jpeg(_segment(0xFE) * (size // 4))


def jpeg_padding(size):
    return _jpeg(b"\xff" * size)


def jpeg_junk(size):
    data = encoded("JPEG")
    table = _segment(0xFE)
    return data[:2] + table + b"\0" * size + data[2:]


def jpeg_exif(size):
    """Return a JPEG with EXIF data in many segments. The decoder joins the segments one at a time."""
    return _jpeg(_segment(0xE1, b"Exif\0\0" + b"\0" * 500) * (size // 510))


def jpeg_tables(size):
    table = _segment(0xDB, (b"\0" + b"\1" * 64) * 1000)
    return _jpeg(table * (size // len(table)))


def jpeg_photoshop(size):
    segment = _segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000)
    return _jpeg(segment * (size // len(segment)))


def jpeg_scans(size, side=4096):
    """Return a progressive JPEG with many scans that change no pixel. Each scan makes the decoder read all
    blocks.
    """
    data = encoded("JPEG", (side, side), "L", progressive=True)
    first = data.index(b"\xff\xda")
    tables = data[:first]
    spectral = data.rindex(b"\xff\xda")
    return tables + data[first:-2] + data[spectral:-2] * (size // len(data[spectral:-2])) + b"\xff\xd9"


def exif_of(tags, size):
    entries = [(30_000 + number, 7, size, 8) for number in range(tags)]
    return tiff(entries, more=b"\0" * size)


def webp_exif(size):
    """Return a WebP with EXIF tags that share their data."""
    return encoded("WEBP", exif=exif_of(4000, size))


def png_exif(size):
    return _png(chunk(b"eXIf", exif_of(4000, size)))


def webp_chunks(size):
    data = encoded("WEBP", exif=exif_of(1, 8))
    body = data[12:] + b"abcd\0\0\0\0" * (size // 8)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def webp_frames(size):
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (80 * i, 0, 0)) for i in range(3)]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    data = file.getvalue()
    last = data[data.rfind(b"ANMF") :]
    body = data[12:] + last * (size // len(last))
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def webp_canvas(size):
    """Return a WebP with a canvas of 268 million pixels around a small picture."""
    data = bytearray(encoded("WEBP", exif=exif_of(1, 8)))
    assert data[12:16] == b"VP8X"
    data[24:30] = b"\xff\x3f\0" * 2
    return bytes(data)


def bmp_lines(size):
    """Return a BMP that stores a single pixel of each line. The decoder adds the other pixels one by one."""
    head = struct.pack("<IiiHHIIiiII", 40, 8000, 8000, 1, 8, 1, 0, 0, 0, 256, 0)
    offset = 14 + len(head) + 1024
    rows = b"\1\7\0\0" * 8000
    return b"BM" + struct.pack("<IHHI", offset + len(rows), 0, 0, offset) + head + bytes(1024) + rows


def bmp_runs(size):
    """Return a run-length encoded BMP. Each run has a single pixel."""
    width, height = 2048, size // 4096
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, size, 0, 0, 256, 0)
    palette = bytes(range(256)) * 4
    offset = 14 + len(head) + len(palette)
    rows = (b"\1\7" * width + b"\0\0") * height
    return b"BM" + struct.pack("<IHHI", offset + len(rows), 0, 0, offset) + head + palette + rows


HOSTILE = {name: make for name, make in list(globals().items()) if name.startswith(("tiff_", "gif_", "png_"))}
HOSTILE |= {
    name: make for name, make in list(globals().items()) if name.startswith(("jpeg_", "webp_", "bmp_"))
}

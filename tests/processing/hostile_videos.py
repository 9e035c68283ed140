"""Creates video files that are expensive to open. Each function in HOSTILE returns at most about `size`
bytes.
"""

import io
import struct

import av
import numpy as np


def record(form="mp4", codec="mpeg4", count=8, size=(16, 16), pixels="yuv420p", **options):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        for _ in range(count):
            frame = av.VideoFrame.from_ndarray(np.zeros((size[1], size[0], 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def box(name, *parts):
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + name + body


def replaced(data, path, make):
    """Return an MP4 in which `make(body)` replaces the body of the box at `path`. Sample offsets are not
    adjusted.
    """
    name, rest = path[0], path[1:]
    made, place = b"", 0
    while place < len(data):
        (size,) = struct.unpack_from(">I", data, place)
        size = size or len(data) - place
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + size]
        if kind == name:
            body = replaced(body, rest, make) if rest else make(body)
            made += box(kind, body)
        else:
            made += data[place : place + size]
        place += size
    return made


_TABLES = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def _table(name, *numbers, more=b""):
    return lambda _: b"\0\0\0\0" + struct.pack(f">{len(numbers)}I", *numbers) + more


def mp4_samples(size):
    """Return a tiny MP4 whose tables claim a hundred million one-byte samples."""
    count = 100_000_000
    data = replaced(record(), (*_TABLES, b"stsz"), _table(b"stsz", 1, count))
    data = replaced(data, (*_TABLES, b"stts"), _table(b"stts", 1, count, 1))
    return replaced(data, (*_TABLES, b"stsc"), _table(b"stsc", 1, 1, count, 1))


def mp4_edits(size):
    """Return an MP4 with many edits. For each edit the demuxer scans nearly all samples."""
    count = size // 16
    samples = 2 * count
    sizes = b"\0\0\0\1" * samples
    data = replaced(record(), (*_TABLES, b"stsz"), _table(b"stsz", 0, samples, more=sizes))
    data = replaced(data, (*_TABLES, b"stts"), _table(b"stts", 1, samples, 1))
    data = replaced(data, (*_TABLES, b"stsc"), _table(b"stsc", 1, 1, samples, 1))
    edits = b"".join(struct.pack(">IIHH", 1, samples - 1 - i % 10, 1, 0) for i in range(count))
    return replaced(data, (b"moov", b"trak", b"edts", b"elst"), _table(b"elst", count, more=edits))


def mp4_keys(size):
    """Return an MP4 with many metadata keys. For each key, the demuxer searches all previous keys."""

    def item(i):
        name = b"%07d" % i
        return box(
            b"----",
            box(b"mean", b"\0\0\0\0", b"a"),
            box(b"name", b"\0\0\0\0", name),
            box(b"data", struct.pack(">II", 1, 0), b"a"),
        )

    count = size // len(item(0))
    items = b"".join(item(i) for i in range(count))
    handler = box(b"hdlr", bytes(8), b"mdirappl", bytes(9))

    def add(body):
        return body + box(b"udta", box(b"meta", b"\0\0\0\0", handler, box(b"ilst", items)))

    return replaced(record(), (b"moov",), add)


def mp4_packed_header(size):
    """Return an MP4 with a compressed header, whose unpacked size is unknown."""
    return replaced(record(), (b"moov",), lambda body: box(b"cmov", box(b"cmvd", bytes(16))) + body)


def mp4_tracks(size):
    data = record()
    start = data.index(b"trak") - 4
    (length,) = struct.unpack_from(">I", data, start)
    track = data[start : start + length]
    return replaced(data, (b"moov",), lambda body: body + track * (size // len(track)))


def mp4_fragments(size):
    """Return an MP4 with single-sample fragments in reverse order of time."""
    data = record(movflags="frag_keyframe+empty_moov+default_base_moof")
    head = data[: data.index(b"moof") - 4]
    count = size // 100

    def fragment(number):
        return box(
            b"moof",
            box(b"mfhd", struct.pack(">II", 0, number)),
            box(
                b"traf",
                box(b"tfhd", struct.pack(">II", 0x020000, 1)),
                box(b"tfdt", struct.pack(">II", 0, (count - number) * 1000)),
                box(b"trun", struct.pack(">IIIII", 0x301, 1, 0, 1000, 4)),
            ),
        )

    return head + b"".join(fragment(i) for i in range(count)) + box(b"mdat", bytes(16))


def mp4_boxes(size):
    return record() + box(b"free") * (size // 8)


def element(name, body):
    return name + b"\x10" + struct.pack(">I", len(body))[1:] + body


def _with_elements(elements):
    """Return a Matroska file with `elements` at the beginning of its segment, whose size is marked as
    unknown.
    """
    data = record("matroska")
    start = data.index(b"\x18\x53\x80\x67") + 4
    width = 9 - data[start].bit_length()
    first = start + width
    return data[:start] + b"\x01" + b"\xff" * 7 + elements + data[first:]


def mkv_tags(size):
    """Return a Matroska file with many different metadata keys."""

    def tag(i):
        return element(b"\x67\xc8", element(b"\x45\xa3", b"%07d" % i) + element(b"\x44\x87", b"a"))

    count = size // len(tag(0))
    tags = element(b"\x73\x73", b"".join(tag(i) for i in range(count)))
    return _with_elements(element(b"\x12\x54\xc3\x67", tags))


def mkv_cues(size):
    """Return a Matroska file whose index is in reverse order."""

    def cue(i):
        where = element(b"\xb7", b"\xf7\x81\x01" + b"\xf1\x84" + struct.pack(">I", i))
        return element(b"\xbb", b"\xb3\x84" + struct.pack(">I", i) + where)

    count = size // len(cue(0))
    return _with_elements(element(b"\x1c\x53\xbb\x6b", b"".join(cue(count - i) for i in range(count))))


def mkv_chapters(size):
    def chapter(i):
        return element(
            b"\xb6", b"\x73\xc4\x84" + struct.pack(">I", i + 1) + b"\x91\x84" + struct.pack(">I", i)
        )

    count = size // len(chapter(0))
    return _with_elements(
        element(b"\x10\x43\xa7\x70", element(b"\x45\xb9", b"".join(chapter(i) for i in range(count))))
    )


def mkv_voids(size):
    return _with_elements(b"\xec\x80" * (size // 2))


def mkv_blocks(size):
    """Return a Matroska file with empty frames, in reverse order of time."""
    count = size // 18
    clusters = b"".join(
        b"\x1f\x43\xb6\x75\x8d\xe7\x84" + struct.pack(">I", count - i) + b"\xa3\x85\x81\0\0\x80\0"
        for i in range(count)
    )
    data = _with_elements(b"")
    return data[: data.index(b"\x1f\x43\xb6\x75")] + clusters


def avi_titles(size):
    """Return an AVI with many different metadata keys."""
    data = record("avi")
    count = size // 10
    names = b"".join(
        bytes([65 + i % 26, 65 + i // 26 % 26, 65 + i // 676 % 26, 65 + i // 17576 % 26])
        + struct.pack("<I", 2)
        + b"a\0"
        for i in range(count)
    )
    info = b"LIST" + struct.pack("<I", 4 + len(names)) + b"INFO" + names
    place = data.rindex(b"LIST", 0, data.index(b"movi"))
    return data[:place] + info + data[place:]


def avi_streams(size):
    data = record("avi")
    start = data.index(b"LIST", data.index(b"avih"))
    (length,) = struct.unpack_from("<I", data, start + 4)
    stream = data[start : start + 8 + length]
    (head,) = struct.unpack_from("<I", data, 16)
    many = stream * (size // len(stream))
    return data[:16] + struct.pack("<I", head + len(many)) + data[20:start] + many + data[start:]


def gif_canvas(size):
    """Return a GIF with one-pixel frames on a canvas of 25 million pixels."""
    frame = b"!\xf9\x04\0\1\0\0\0," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", 5000, 5000, 0x80, 0, 0)
        + bytes(6)
        + frame * (size // len(frame))
        + b";"
    )


HOSTILE = {
    name: make for name, make in list(globals().items()) if name.startswith(("mp4_", "mkv_", "avi_", "gif_"))
}

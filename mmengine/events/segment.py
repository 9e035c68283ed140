r"""Reads segments, the files of a log. A segment's name is the number of its first record.

    00000000000000000000.mmlog        header, frames, and a footer when the segment is complete
    00000000000000000000.mmlog.zst    a full segment, packed with zstd
    snapshot-00000000000000012345.mmsnap   the state after record 12345; earlier segments may be deleted

Header and footer have 64 bytes each, little endian, with a CRC-32 over their other bytes.

    magic "mmlog\r\n\x1a" | format u16 | header size u16 | reserved u32 | first sequence u64
    wall clock ns u64 | mono ns u64 | engine version, 20 bytes of ASCII | crc32 u32

    magic "mmlogend" | records u64 | last sequence u64 | first step u64 | last step u64 | last mono ns u64
    frames u32 | chain u32 | what follows u32 | crc32 u32

The chain is a CRC-32 over the header's CRC and all frames' CRCs, in order. The first step comes from the
first frame's header, and the last step and time from the last frame's header. "What follows" is a value from
`Follows`.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from stat import S_ISREG

import msgspec
import zstandard

from mmengine.errors import CorruptLog, LogError
from mmengine.events.codec import HEADER as FRAME_HEADER
from mmengine.events.codec import MAGIC as FRAME_MAGIC
from mmengine.events.codec import DamagedRecord, Frame, TornRecord, UnknownRecord, frame_at
from mmengine.events.file_system import NO_WAIT, open_file

SUFFIX = ".mmlog"
PACKED_SUFFIX = ".mmlog.zst"
FORMAT = 1
MAX_SEGMENTS = 100_000
MAX_SEGMENT_BYTES = 2**32  # a reader rejects larger files; a writer begins a new segment much earlier
MAX_UNPACKED_BYTES = 128 * 2**20  # limit for packing, because readers unpack a whole segment in memory
_HEADER_MAGIC = b"mmlog\r\n\x1a"
_OLD_MAGICS = (b"MMELOG\r\n", b"MMEV")  # the first bytes of segments from versions before 0.1.0
_HEADER = struct.Struct("<8sHHIQQQ20s")
_FOOTER_MAGIC = b"mmlogend"
_FOOTER = struct.Struct("<8sQQQQQIII")
HEADER_SIZE = FOOTER_SIZE = 64


class Follows(IntEnum):
    """The value "what follows" in a footer. SEGMENT: another segment follows. NOTHING: the writer closed the
    log. REPAIRED: the writer was killed, and a repair closed the segment.
    """

    SEGMENT = 1
    NOTHING = 2
    REPAIRED = 3


class Header(msgspec.Struct, frozen=True):
    """A segment's header, as described in the module docstring."""

    first_sequence: int
    wall_ns: int
    mono_ns: int
    engine_version: str
    format: int = FORMAT

    def pack(self) -> bytes:
        version = self.engine_version.encode("ascii", "replace")[:20]
        fields = (self.format, HEADER_SIZE, 0, self.first_sequence, self.wall_ns, self.mono_ns, version)
        return _with_crc(_HEADER.pack(_HEADER_MAGIC, *fields))


class Footer(msgspec.Struct):
    """Counters over the frames in a segment."""

    count: int = 0
    last_sequence: int = 0
    first_step: int = 0
    last_step: int = 0
    last_mono_ns: int = 0
    frames: int = 0
    chain: int = 0

    def add(self, crc: int, count: int, sequence: int, step: int, mono_ns: int) -> None:
        """Count a frame. The arguments are values from the frame's header."""
        if not self.frames:
            self.first_step = step
        self.count += count
        self.frames += 1
        self.last_sequence, self.last_step, self.last_mono_ns = sequence + count - 1, step, mono_ns
        self.chain = zlib.crc32(crc.to_bytes(4, "little"), self.chain)

    def pack(self, follows: Follows) -> bytes:
        fields = (self.count, self.last_sequence, self.first_step, self.last_step, self.last_mono_ns)
        return _with_crc(_FOOTER.pack(_FOOTER_MAGIC, *fields, self.frames, self.chain, follows))


def _with_crc(block: bytes) -> bytes:
    return block + zlib.crc32(block).to_bytes(4, "little")


class Scan:
    """Reads the frames in a segment, in order.

    `header`: the segment's header, or None before it was read. `footer`: counters over the frames so far.
    `follows`: the value in the segment's footer, or None until `frames` has read the footer.
    """

    def __init__(self, data: bytes | mmap.mmap):
        self.data = data
        self.header: Header | None = None
        self.footer = Footer()
        self.follows: Follows | None = None

    @property
    def is_closed(self) -> bool:
        return self.follows is not None

    def frames(self, jump_to: int | None = None) -> Iterator[Frame]:
        """Yield complete frames from offset `jump_to` on, or from the beginning. Raises TornRecord,
        DamagedRecord or UnknownRecord at the first invalid frame. With `jump_to`, the footer is not compared
        with the counters.
        """
        data, size = self.data, len(self.data)
        offset = 0 if jump_to is None else jump_to
        if jump_to is None and size:
            self.header, offset = _header(data), HEADER_SIZE
            self.footer.chain = zlib.crc32(data[HEADER_SIZE - 4 : HEADER_SIZE])
        add = self.footer.add
        while offset < size:
            if data[offset : offset + 8] == _FOOTER_MAGIC:
                self._end(offset, compare=jump_to is None)
                return
            frame = frame_at(data, offset)
            add(frame.crc, frame.count, frame.sequence, frame.step, frame.mono_ns)
            offset = frame.end
            yield frame

    def _end(self, offset: int, *, compare: bool) -> None:
        block = self.data[offset : offset + FOOTER_SIZE]
        if len(block) < FOOTER_SIZE:
            raise TornRecord(offset, "the footer")
        if block[-4:] != zlib.crc32(block[:-4]).to_bytes(4, "little"):
            raise DamagedRecord(offset, "the footer's checksum does not match")
        if offset + FOOTER_SIZE != len(self.data):
            raise DamagedRecord(offset, "bytes follow the footer")
        said = int.from_bytes(block[-8:-4], "little")
        if said not in list(Follows):
            raise DamagedRecord(offset, f"the footer has the unknown value {said} for the next segment")
        if compare and block != self.footer.pack(Follows(said)):
            raise DamagedRecord(offset, "the footer does not fit the records before it", "gap")
        self.follows = Follows(said)


def _header(data: bytes | mmap.mmap) -> Header:
    block = data[:HEADER_SIZE]
    if block.startswith(_OLD_MAGICS):
        raise CorruptLog("this log was written before 0.1.0; read it with the build that wrote it", "version")
    if len(block) < HEADER_SIZE:
        raise TornRecord(0, "the header")
    if block[:8] != _HEADER_MAGIC:
        raise DamagedRecord(0, "the file does not begin like a segment")
    if block[-4:] != zlib.crc32(block[:-4]).to_bytes(4, "little"):
        raise DamagedRecord(0, "the header's checksum does not match")
    _, fmt, _, _, first, wall_ns, mono_ns, version = _HEADER.unpack(block[:-4])
    if fmt != FORMAT:
        raise UnknownRecord(0, f"format {fmt} is newer than this build knows")
    return Header(first, wall_ns, mono_ns, version.rstrip(b"\0").decode("ascii", "replace"), fmt)


def find_whole(data: bytes | mmap.mmap, offset: int) -> int | None:
    """Return the offset of the first complete frame or footer at or after `offset`, or None.

    Computes a checksum at each position that begins like a frame or a footer. A hostile file can contain many
    such positions. CorruptLog is therefore raised when the checksums have covered four times as many bytes as
    the segment has.
    """
    patience = 4 * len(data) + FRAME_HEADER.size
    for place in _likely_places(data, offset):
        if data[place : place + 8] == _FOOTER_MAGIC:
            block = data[place : place + FOOTER_SIZE]
            patience -= FOOTER_SIZE
            if len(block) == FOOTER_SIZE and block[-4:] == zlib.crc32(block[:-4]).to_bytes(4, "little"):
                return place
        else:
            try:
                frame_at(data, place)
                return place
            except TornRecord:
                patience -= FRAME_HEADER.size
            except DamagedRecord as error:
                length = FRAME_HEADER.unpack_from(data, place)[2] if error.kind == "checksum" else 0
                patience -= FRAME_HEADER.size + length
        if patience <= 0:
            raise CorruptLog(
                f"after byte {offset} follow bytes that were made to look like records", "length"
            )
    return None


def _likely_places(data: bytes | mmap.mmap, offset: int) -> Iterator[int]:
    """Yield the offsets at which bytes begin like a frame or a footer, in order."""
    magics = (FRAME_MAGIC, _FOOTER_MAGIC)
    found = {magic: data.find(magic, offset) for magic in magics}
    while any(place >= 0 for place in found.values()):
        magic = min((m for m in magics if found[m] >= 0), key=found.__getitem__)
        yield found[magic]
        found[magic] = data.find(magic, found[magic] + 1)


def segment_name(first_sequence: int) -> str:
    return f"{first_sequence:020d}{SUFFIX}"


def part_of(folder: Path, first_sequence: int) -> Path:
    """Return the temporary path for a segment that has a header but no committed record yet."""
    return folder / f"{first_sequence:020d}.part"


def first_sequence_of(path: Path) -> int:
    """Return the record number in a segment's file name, or 0 if the name has none."""
    number = path.name.split(".")[0]
    return int(number) if number.isdecimal() and len(number) == 20 else 0


def segment_paths(folder: Path) -> list[Path]:
    """Return the segments' paths in order. If a segment exists packed and unpacked, because packing was
    interrupted, the unpacked file's path is returned. Raises LogError for too many segments, and CorruptLog
    for a link.
    """
    by_name: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}*")):
        if not path.name.endswith((SUFFIX, PACKED_SUFFIX)):
            continue
        if path.is_symlink():
            raise CorruptLog(
                f"{path} is a link, and links are not followed; put the file itself there", "link"
            )
        if path.is_file():
            by_name.setdefault(path.name.removesuffix(".zst"), path)
    if len(by_name) > MAX_SEGMENTS:
        raise LogError(f"{folder} holds more than {MAX_SEGMENTS} segments")
    return [by_name[name] for name in sorted(by_name)]


def snapshot_sequences(folder: Path) -> list[int]:
    """Return the number of the last record before each snapshot, in ascending order."""
    names = (path.stem.removeprefix("snapshot-") for path in folder.glob("snapshot-*.mmsnap"))
    return sorted(int(name) for name in names if name.isdecimal())


@contextmanager
def open_segment(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Open a segment and yield its unpacked bytes. Raises CorruptLog for an impossible size or a damaged
    packed file, and LogError if the file cannot be read.
    """
    path, fd = _opened_file(path)
    try:
        status = os.fstat(fd)
        if not S_ISREG(status.st_mode):
            raise CorruptLog(f"{path.name} is not a regular file", "link")
        if status.st_size > MAX_SEGMENT_BYTES:
            most = f"more than any segment ({MAX_SEGMENT_BYTES})"
            raise CorruptLog(f"{path.name} has {status.st_size} bytes, {most}", "oversize")
        if path.name.endswith(PACKED_SUFFIX):
            yield _unpacked(path, fd, status.st_size)
        elif not status.st_size:
            yield b""
        else:
            with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
                yield data
    finally:
        os.close(fd)


def _opened_file(path: Path) -> tuple[Path, int]:
    """Open the segment and return its path and descriptor. If a running writer has just packed the segment,
    the returned path is the packed file's.
    """
    try:
        return path, open_file(path, os.O_RDONLY | NO_WAIT)
    except FileNotFoundError:
        if path.name.endswith(SUFFIX):
            return _opened_file(path.with_name(path.stem + PACKED_SUFFIX))
        raise LogError(f"{path} was removed while the log was read") from None
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None


def _unpacked(path: Path, fd: int, size: int) -> bytes:
    if size > MAX_UNPACKED_BYTES:
        raise CorruptLog(f"{path.name} has {size} bytes packed, more than any segment", "oversize")
    with open(fd, "rb", closefd=False) as file:
        packed = file.read(size)
    try:
        claimed = zstandard.frame_content_size(packed)
        if not 0 <= claimed <= MAX_UNPACKED_BYTES:
            what = "does not state its size" if claimed < 0 else f"claims to hold {claimed} bytes"
            raise CorruptLog(f"{path.name} {what}; at most {MAX_UNPACKED_BYTES} are unpacked", "oversize")
        unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_UNPACKED_BYTES)
        return unpacker.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptLog(f"{path.name} is damaged and cannot be unpacked: {error}") from None

"""Format 1, which is read and no longer written: one framed record an event.

Header, little endian, 40 bytes, and a msgpack body:

    magic "MMEV"   u32 | format u8 | type u8 | reserved u16 | body length u32 | crc32 u32
    sequence u64 | step u64 | monotonic ns u64

The CRC covers the header (with the CRC field zero) and the body. Segments had no header and no footer.
"""

import struct
import zlib

from mmengine.events.codec import (
    MAX_BODY,
    DamagedRecord,
    Data,
    Frame,
    Record,
    TornRecord,
    UnknownRecord,
    decode_event,
)
from mmengine.events.values import MAX_VALUES, holds_too_many

FORMAT = 1
MAGIC = b"MMEV"
HEADER = struct.Struct("<4sBBHIIQQQ")


def frame_at(data: Data, offset: int) -> Frame:
    """The record at `offset`, whole by its checksum. Raises TornRecord, DamagedRecord, UnknownRecord."""
    if len(data) - offset < HEADER.size:
        raise TornRecord(offset)
    magic, fmt, number, reserved, length, crc, sequence, step, mono_ns = HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        raise DamagedRecord(offset, "it does not begin as a record does")
    if length > MAX_BODY:
        raise DamagedRecord(offset, f"it claims {length} bytes, more than {MAX_BODY}", "oversize")
    start = offset + HEADER.size
    end = start + length
    if end > len(data):
        raise TornRecord(offset)
    blank = HEADER.pack(magic, fmt, number, reserved, length, 0, sequence, step, mono_ns)
    if zlib.crc32(data[start:end], zlib.crc32(blank)) != crc:
        raise DamagedRecord(offset, "its checksum does not match")
    if fmt != FORMAT:
        raise UnknownRecord(offset, f"format {fmt} type {number} is newer than this build knows")
    return Frame(offset, start, end, crc, sequence, 1, step, mono_ns, number)


def records_in(data: Data, frame: Frame) -> list[Record]:
    """The one record of a frame. Raises UnknownRecord."""
    body = data[frame.start : frame.end]
    if holds_too_many(body):
        raise UnknownRecord(frame.offset, f"it holds more than {MAX_VALUES} values")
    event = decode_event(FORMAT, frame.number, body, frame.offset)
    return [Record(frame.sequence, frame.step, frame.mono_ns, event, frame.offset)]

"""Records: a fixed header and a msgpack body, each checked by CRC-32 before it is believed.

Header, little endian, 40 bytes:

    magic "MMEV"   u32 | format u8 | type u8 | reserved u16 | body length u32 | crc32 u32
    sequence u64 | step u64 | monotonic ns u64

The CRC covers the header (with the CRC field zero) and the body.
"""

import struct
import zlib
from dataclasses import dataclass

import msgspec

from mmengine.errors import CorruptLog
from mmengine.events.vocabulary import NUMBERS, TYPES, Event

MAGIC_BYTES = b"MMEV"
MAGIC = int.from_bytes(MAGIC_BYTES, "little")
FORMAT = 1
HEADER = struct.Struct("<IBBHIIQQQ")
MAX_BODY = 256 * 2**20  # the longest prompt that settings allow, with a run of media at each token, fits

_encoder = msgspec.msgpack.Encoder()
_decoders = {number: msgspec.msgpack.Decoder(cls) for number, cls in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """An event with its place in the log. `step`: the step that was open or next when it was
    appended. `offset`: of its header in the segment."""

    sequence: int
    step: int
    mono_ns: int
    event: Event
    offset: int = 0


class TornRecord(Exception):
    """The bytes end before the record does."""

    def __init__(self, offset: int):
        super().__init__(f"the record at byte {offset} is cut short")
        self.offset = offset


class DamagedRecord(CorruptLog):
    """Bytes that are no record, or contradict their checksum."""

    def __init__(self, offset: int, what: str):
        super().__init__(f"the record at byte {offset} is damaged: {what}")


class UnknownRecord(CorruptLog):
    """A record that was written as it stands, its checksum says so, but that cannot be read here."""

    def __init__(self, offset: int, what: str):
        super().__init__(f"the record at byte {offset} cannot be read: {what}")


def settled(event: Event) -> Event:
    """The event as a reader of the log will see it.

    Raises ValueError for what a log cannot hold: a value of another type than the event says, a
    number that is too large, half of a surrogate pair.
    """
    try:
        body = _encoder.encode(event)
        if len(body) > MAX_BODY:
            raise ValueError(f"it needs {len(body)} bytes, more than {MAX_BODY}")
        return _decoders[NUMBERS[type(event)]].decode(body)
    except (TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


def encode(event: Event, sequence: int, step: int, mono_ns: int) -> bytes:
    body = _encoder.encode(event)
    head = (MAGIC, FORMAT, NUMBERS[type(event)], 0, len(body))
    crc = zlib.crc32(body, zlib.crc32(HEADER.pack(*head, 0, sequence, step, mono_ns)))
    return HEADER.pack(*head, crc, sequence, step, mono_ns) + body


def decode_at(data: bytes | memoryview, offset: int) -> tuple[Record, int]:
    """The record at `offset` and the offset behind it. Raises TornRecord, DamagedRecord, UnknownRecord."""
    if len(data) - offset < HEADER.size:
        raise TornRecord(offset)
    magic, fmt, number, _, length, crc, sequence, step, mono_ns = HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        raise DamagedRecord(offset, "it does not begin as a record does")
    if length > MAX_BODY:
        raise DamagedRecord(offset, f"it claims {length} bytes, more than {MAX_BODY}")
    start = offset + HEADER.size
    end = start + length
    if end > len(data):
        raise TornRecord(offset)
    body = data[start:end]
    blank = HEADER.pack(
        magic, fmt, number, *HEADER.unpack_from(data, offset)[3:5], 0, sequence, step, mono_ns
    )
    if zlib.crc32(body, zlib.crc32(blank)) != crc:
        raise DamagedRecord(offset, "its checksum does not match")
    if fmt != FORMAT or number not in _decoders:
        raise UnknownRecord(offset, f"format {fmt} type {number} is newer than this build knows")
    try:
        event = _decoders[number].decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError
        raise UnknownRecord(offset, f"its body is no {TYPES[number].__name__}: {error}") from None
    return Record(sequence, step, mono_ns, event, offset), end

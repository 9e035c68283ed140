"""Encodes and decodes frames. A frame contains the records of a commit and a CRC-32.

A frame consists of a header with 40 bytes, little endian, and a msgpack body.

    magic "mmfr" | crc32 u32 | body length u32 | records u32 | first sequence u64 | step u64 | mono ns u64

The CRC covers all bytes after it, and is checked before any record is decoded. The body is an array of (type
number, step, mono ns, event). Step and time are relative to the header's values. The records in a frame have
consecutive sequence numbers, and the header stores the first number.
"""

import mmap
import struct
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from mmengine.errors import CorruptLog
from mmengine.events.vocabulary import NUMBERS, TYPES, Event

MAGIC = b"mmfr"
HEADER = struct.Struct("<4sIIIQQQ")
_CHECKED = struct.Struct("<IIQQQ")  # the header fields that the checksum covers
_CRC_FROM = HEADER.size - _CHECKED.size
# Maximum body length in bytes. The record with the longest allowed prompt is shorter.
MAX_BODY = 256 * 2**20
MAX_RECORDS = 2**14  # maximum number of records in a frame
MAX_COUNTER = 2**64
E = TypeVar("E", bound=Event)
Data = bytes | memoryview | mmap.mmap  # the bytes in a segment

_encoder = msgspec.msgpack.Encoder()
_Outline = Annotated[list[tuple[int, int, int, msgspec.Raw]], msgspec.Meta(max_length=MAX_RECORDS)]
_outline = msgspec.msgpack.Decoder(_Outline)
_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
    number: msgspec.msgpack.Decoder(cls) for number, cls in TYPES.items()
}


LARGE = 2**20  # smaller bodies (in bytes) cannot have too many values
MAX_VALUES = 8 * 2**20  # maximum number of msgpack values in a body


def _sizes() -> list[int]:
    """Return a list that maps a msgpack value's first byte to the value's size in bytes. Sizes of arrays and
    maps do not include the elements. The size 0 means that the length follows the first byte.
    """
    sizes = [1] * 256
    sizes[0xA0:0xC0] = range(1, 33)  # strings with less than 32 bytes
    for first, size in ((0xC4, 0), (0xCA, 5), (0xCB, 9), (0xCC, 2), (0xCD, 3), (0xCE, 5), (0xCF, 9)):
        sizes[first] = size
    for first, size in ((0xC5, 0), (0xC6, 0), (0xD0, 2), (0xD1, 3), (0xD2, 5), (0xD3, 9), (0xD9, 0)):
        sizes[first] = size
    for first, size in ((0xDA, 0), (0xDB, 0), (0xDC, 3), (0xDD, 5), (0xDE, 3), (0xDF, 5)):
        sizes[first] = size
    return sizes


_SIZES = _sizes()
_U8, _U16, _U32 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
_LENGTHS = {0xC4: _U8, 0xC5: _U16, 0xC6: _U32, 0xD9: _U8, 0xDA: _U16, 0xDB: _U32}


def has_too_many_values(body: bytes | memoryview) -> bool:
    """Return whether a large body holds more than MAX_VALUES values.

    In Python, a tiny value needs far more memory than its msgpack bytes. A hostile body with many tiny values
    would therefore exhaust the memory. If the body is not msgpack, the result is arbitrary.
    """
    if len(body) <= LARGE:
        return False
    place, count, end, sizes = 0, 0, len(body), _SIZES
    while place < end:
        size = sizes[body[place]]
        if not size:
            form = _LENGTHS[body[place]]
            if place + 1 + form.size > end:
                return False
            size = 1 + form.size + form.unpack_from(body, place + 1)[0]
        place += size
        count += 1
        if count > MAX_VALUES:
            return True
    return False


class Record(msgspec.Struct, frozen=True, gc=False):
    """An event with its position in the log.

    `sequence`: the record's number in the log. `step`: the current step's number when the event was appended;
    between steps, the next step's number. `offset`: the offset of the record's frame in the segment, in
    bytes.
    """

    sequence: int
    step: int
    mono_ns: int
    event: Event
    offset: int = 0


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame whose checksum was verified. The frame occupies the bytes [offset, end) in a segment. Its body
    begins at `start`.

    `sequence`, `step` and `mono_ns` describe the first record. `count`: the number of records.
    """

    offset: int
    start: int
    end: int
    crc: int
    sequence: int
    count: int
    step: int
    mono_ns: int


class TornRecord(Exception):
    """The data ends within a frame, as after an interrupted write."""

    def __init__(self, offset: int, what: str = "the record"):
        super().__init__(f"{what} at byte {offset} is cut short")
        self.offset = offset


class DamagedRecord(CorruptLog):
    """The bytes are not a frame, or the frame's checksum does not match."""

    def __init__(self, offset: int, what: str, kind: str = "checksum"):
        super().__init__(f"the record at byte {offset} is damaged: {what}", kind)


class UnknownRecord(CorruptLog):
    """The frame's checksum matches, but this build cannot read a record in the frame."""

    def __init__(self, offset: int, what: str):
        super().__init__(f"the record at byte {offset} cannot be read: {what}", "version")


def as_logged(event: E) -> E:
    """Return the event as a reader of the log would decode the event.

    Raises ValueError for a value that a log cannot hold: a wrong type, a number that is too large, or half a
    surrogate pair.
    """
    try:
        body = _encoder.encode(event)
        if len(body) > MAX_BODY - 64:
            raise ValueError(f"it needs {len(body)} bytes, more than {MAX_BODY}")
        return _decoders[NUMBERS[type(event)]].decode(body)
    except (TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


def encode(records: Sequence[tuple[int, int, int, Event]], sequence: int) -> list[bytes]:
    """Return the records (type number, step, mono ns, event) as frames. `sequence`: the first record's
    number.

    Records that exceed a frame's limits are divided among several frames. Raises ValueError if a single
    record exceeds the limits.
    """
    kind, step, mono_ns, event = records[0]
    if len(records) == 1:
        body = _encoder.encode([(kind, 0, 0, event)])
    else:
        body = _encoder.encode([(kind, at - step, ns - mono_ns, event) for kind, at, ns, event in records])
    if len(body) > MAX_BODY or len(records) > MAX_RECORDS:
        half = len(records) // 2
        if not half:
            raise ValueError(f"record {sequence} needs {len(body)} bytes, more than {MAX_BODY}")
        return encode(records[:half], sequence) + encode(records[half:], sequence + half)
    checked = _CHECKED.pack(len(body), len(records), sequence, step, mono_ns)
    crc = zlib.crc32(body, zlib.crc32(checked))
    return [b"".join((MAGIC, crc.to_bytes(4, "little"), checked, body))]


def frame_at(data: Data, offset: int) -> Frame:
    """Return the frame at `offset`. Raises TornRecord if the data ends within the frame. Raises DamagedRecord
    if the bytes are not a frame, or if the checksum does not match.
    """
    if len(data) - offset < HEADER.size:
        raise TornRecord(offset)
    magic, crc, length, count, sequence, step, mono_ns = HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        raise DamagedRecord(offset, "it does not begin like a record")
    if length > MAX_BODY:
        raise DamagedRecord(offset, f"it claims {length} bytes, more than {MAX_BODY}", "oversize")
    end = offset + HEADER.size + length
    if end > len(data):
        raise TornRecord(offset)
    if zlib.crc32(data[offset + _CRC_FROM : end]) != crc:
        raise DamagedRecord(offset, "its checksum does not match")
    return Frame(offset, offset + HEADER.size, end, crc, sequence, count, step, mono_ns)


def records_in(data: Data, frame: Frame) -> list[Record]:
    """Return the records in a frame. Raises UnknownRecord for a record that this build cannot read."""
    offset, sequence, step, mono_ns = frame.offset, frame.sequence, frame.step, frame.mono_ns
    body = data[frame.start : frame.end]
    if has_too_many_values(body):
        raise UnknownRecord(offset, f"it holds more than {MAX_VALUES} values")
    try:
        outline = _outline.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnknownRecord(offset, f"its body is not a list of records: {_said(error)}") from None
    if len(outline) != frame.count:
        raise UnknownRecord(offset, f"it claims {frame.count} records and holds {len(outline)}")
    records = []
    for number, steps, ns, body in outline:
        if not (0 <= step + steps < MAX_COUNTER and 0 <= mono_ns + ns < MAX_COUNTER):
            raise UnknownRecord(offset, "a record's step or time is out of range")
        event = decode_event(number, body, offset)
        records.append(Record(sequence, step + steps, mono_ns + ns, event, offset))
        sequence += 1
    return records


def decode_event(number: int, body: bytes | memoryview | msgspec.Raw, offset: int) -> Event:
    """Decode the body of an event with the type `number`. Raises UnknownRecord if this build cannot read
    it.
    """
    decoder = _decoders.get(number)
    if decoder is None:
        raise UnknownRecord(offset, f"event type {number} is newer than this build knows")
    try:
        event: Event = decoder.decode(body)
        return event
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError for invalid UTF-8
        raise UnknownRecord(offset, f"its body is not a {TYPES[number].__name__}: {_said(error)}") from None


def _said(error: Exception) -> str:
    """Return an error's text as a printable line. A hostile log's text may contain control characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(error)[:200])

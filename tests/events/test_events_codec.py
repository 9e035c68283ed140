"""Records: what goes in comes out, and what is no record is told apart."""

import struct
import tracemalloc
import zlib
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.events.codec import (
    HEADER,
    MAGIC,
    MAX_BODY,
    DamagedRecord,
    TornRecord,
    UnknownRecord,
    decode_at,
    encode,
    settled,
)
from mmengine.request import MediaItem, SamplingParams
from tests.events.logs import one_of_each

INTS = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(max_size=12)
BYTES = st.binary(max_size=24)
FLOATS = st.floats(allow_nan=False)
PAIRS = st.lists(st.tuples(INTS, TEXT), max_size=3).map(tuple)
WORK = st.lists(st.tuples(BYTES, INTS, INTS), max_size=2).map(tuple)
KEYS = st.lists(BYTES, max_size=2).map(tuple)
RUNS = st.lists(st.tuples(INTS, INTS), max_size=3).map(tuple)
LOGPROBS = st.lists(st.tuples(INTS, st.lists(st.tuples(INTS, FLOATS), max_size=2).map(tuple)), max_size=2)
SETTINGS = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=INTS,
    temperature=FLOATS,
    logit_bias=st.dictionaries(st.integers(-(2**63), 2**63 - 1), FLOATS, max_size=2),
    seed=st.none() | INTS,
    stop=st.lists(TEXT, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | INTS,
)
MEDIA = st.builds(MediaItem, BYTES, TEXT, RUNS, st.tuples(INTS, INTS, INTS))
FIELDS = {
    ev.Started: (
        INTS,
        TEXT,
        INTS,
        st.dictionaries(TEXT, SETTINGS, max_size=3),
        st.dictionaries(TEXT, TEXT),
        INTS,
    ),
    ev.Queued: (
        TEXT,
        BYTES,
        SAMPLING,
        st.lists(MEDIA, max_size=2).map(tuple),
        INTS,
        INTS,
        TEXT,
        INTS,
        st.none() | TEXT,
        TEXT,
    ),
    ev.GrammarReady: (TEXT,),
    ev.GrammarFailed: (TEXT, TEXT),
    ev.Cancelled: (TEXT, TEXT),
    ev.Preempted: (TEXT, INTS, TEXT, TEXT, BYTES, INTS, INTS),
    ev.Scheduled: (
        st.none() | BYTES,
        st.none() | BYTES,
        BYTES,
        WORK,
        KEYS,
        st.none() | BYTES,
        st.none() | BYTES,
    ),
    ev.Admitted: (
        TEXT,
        INTS,
        INTS,
        BYTES,
        BYTES,
        WORK,
        KEYS,
        INTS,
        st.none() | st.tuples(INTS, INTS),
        st.booleans(),
    ),
    ev.Evicted: (KEYS, KEYS),
    ev.Dispatched: (),
    ev.Executed: (
        BYTES,
        PAIRS,
        PAIRS,
        LOGPROBS.map(tuple),
        INTS,
        st.none() | BYTES,
        BYTES,
        st.none() | BYTES,
        st.none() | BYTES,
    ),
    ev.Failed: (TEXT,),
    ev.Finished: (TEXT, TEXT, TEXT),
    ev.Delivered: (TEXT,),
    ev.CacheReset: (st.booleans(),),
    ev.Checkpoint: (BYTES,),
    ev.Stalled: (TEXT, TEXT, TEXT),
}
EVENTS = st.one_of(*(st.builds(cls, *fields) for cls, fields in FIELDS.items()))
HUGE = 2**32 - 1


def header(body: bytes, *, fmt: int = 1, number: int = 8, length: int | None = None) -> bytes:
    """A header with a right checksum, whatever it says."""
    head = (MAGIC, fmt, number, 0, len(body) if length is None else length)
    crc = zlib.crc32(body, zlib.crc32(HEADER.pack(*head, 0, 0, 0, 0)))
    return HEADER.pack(*head, crc, 0, 0, 0)


def record_of(body: bytes, **fields: int) -> bytes:
    return header(body, **fields) + body


def test_every_type_is_drawn():
    assert set(FIELDS) == set(ev.TYPES.values())
    assert all(len(fields) == len(cls.__struct_fields__) for cls, fields in FIELDS.items())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(EVENTS, *(st.integers(0, 2**64 - 1) for _ in range(3)), st.binary(max_size=5))
def test_round_trip(event, sequence, step, mono_ns, before):
    data = before + encode(event, sequence, step, mono_ns)
    record, end = decode_at(data + b"more", len(before))
    assert (record.event, type(record.event)) == (event, type(event))
    assert (record.sequence, record.step, record.mono_ns) == (sequence, step, mono_ns)
    assert (record.offset, end) == (len(before), len(data))
    assert settled(event) == event


def test_logprobs_need_not_be_numbers():
    event = ev.Executed(b"", logprobs=((0, ((1, float("nan")), (2, float("-inf")))),))
    data = encode(event, 0, 0, 0)
    assert encode(decode_at(data, 0)[0].event, 0, 0, 0) == data


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(ev.TYPES)), st.binary(max_size=60))
def test_a_body_of_anything_is_read_or_refused(number, body):
    with suppress(UnknownRecord):
        decode_at(record_of(body, number=number), 0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(one_of_each()), st.data())
def test_a_body_with_some_bytes_changed_is_read_or_refused(event, data):
    body = bytearray(msgspec.msgpack.encode(event))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(UnknownRecord):
        decode_at(record_of(bytes(body), number=ev.NUMBERS[type(event)]), 0)


def test_type_numbers_and_fields_are_for_ever():
    """Fields are only added at the end with a default. Change this test by adding to it."""
    numbers = "Started Queued Cancelled Preempted Scheduled Admitted Executed Failed Finished Delivered"
    numbers += " CacheReset Checkpoint"
    fields = {
        1: "schema engine_version decision_version config fingerprints num_blocks",
        2: "request_id prompt sampling media sample_index priority cache_salt deadline_ns grammar",
        3: "request_id reason",
        4: "request_id row mode reason",
        5: "rows num_tokens new_blocks encode evict",
        6: "request_id row num_tokens cached_blocks new_blocks encode evict",
        7: "token_ids stops errors logprobs device_ns",
        8: "error",
        9: "request_id reason detail",
        10: "request_id",
        11: "",
        12: "digest",
    }
    for number, name in enumerate(numbers.split(), start=1):
        cls, known = ev.TYPES[number], fields[number].split()
        assert cls.__name__ == name
        assert list(cls.__struct_fields__[: len(known)]) == known
        later = len(cls.__struct_fields__) - len(known)
        assert len(cls.__struct_defaults__) >= later


def test_fields_of_a_later_build_are_skipped_and_missing_ones_filled():
    known = msgspec.msgpack.decode(msgspec.msgpack.encode(ev.Finished("a", "stop", "eos")))
    later = msgspec.msgpack.encode([*known, "something new"])
    assert decode_at(record_of(later, number=9), 0)[0].event == ev.Finished("a", "stop", "eos")
    earlier = msgspec.msgpack.encode(known[:2])
    assert decode_at(record_of(earlier, number=9), 0)[0].event == ev.Finished("a", "stop", "")


@pytest.mark.parametrize("fmt, number", [(2, 8), (0, 8), (1, 0), (1, 100), (1, 255)])
def test_what_is_newer_is_said_to_be(fmt, number):
    with pytest.raises(UnknownRecord, match=f"format {fmt} type {number} is newer"):
        decode_at(record_of(b"\x91\xa0", fmt=fmt, number=number), 0)


def test_wrong_magic():
    data = bytearray(encode(ev.CacheReset(), 0, 0, 0))
    data[0] ^= 1
    with pytest.raises(DamagedRecord, match="byte 0 is damaged"):
        decode_at(data, 0)


def test_a_length_over_the_limit_is_damage_and_one_below_it_a_cut():
    with pytest.raises(DamagedRecord, match="3000000000 bytes"):
        decode_at(header(b"", length=3_000_000_000), 0)
    with pytest.raises(TornRecord):
        decode_at(header(b"", length=MAX_BODY), 0)


LIES = {
    "bytes": (7, b"\x91\xc6" + struct.pack(">I", HUGE)),
    "text": (8, b"\x91\xdb" + struct.pack(">I", HUGE)),
    "tuple": (7, b"\x92\xc4\x00\xdd" + struct.pack(">I", HUGE)),
    "event": (7, b"\xdd" + struct.pack(">I", HUGE)),
    "dict": (1, b"\x94\x01\xa0\x01\xdf" + struct.pack(">I", HUGE)),
    "lists in lists": (1, b"\x94\x01\xa0\x01\x81\xa0" + b"\xdc\xff\xff" * 800),
    "too deep": (1, b"\x94\x01\xa0\x01\x81\xa0" + b"\x91" * 100_000),
    "dicts too deep": (1, b"\x94\x01\xa0\x01" + b"\x81\xa0" * 100_000),
    "bad utf-8": (8, b"\x91\xa1\xff"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_body_is_refused_without_memory(name):
    number, body = LIES[name]
    data = record_of(body, number=number)
    tracemalloc.start()
    try:
        with pytest.raises(UnknownRecord):
            decode_at(data, 0)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_unknown_is_corrupt_but_not_damaged():
    assert issubclass(UnknownRecord, CorruptLog) and not issubclass(UnknownRecord, DamagedRecord)


@pytest.mark.parametrize(
    "event",
    [
        ev.Queued("\ud800", b"", SamplingParams()),
        ev.Queued("a", b"", SamplingParams(seed=1.5)),
        ev.Queued("a", b"", SamplingParams(stop_token_ids=("1",))),
        ev.Queued("a", b"", SamplingParams(max_tokens=True)),
        ev.Queued("a", b"", SamplingParams(), sample_index=2**65),
        ev.Queued("a", b"", object()),
    ],
)
def test_settled_refuses_what_would_not_come_back(event):
    with pytest.raises(ValueError):
        settled(event)


def test_settled_refuses_what_is_too_long(monkeypatch):
    monkeypatch.setattr("mmengine.events.codec.MAX_BODY", 100)
    with pytest.raises(ValueError, match="more than 100"):
        settled(ev.Failed("x" * 100))


def test_settled_gives_what_the_reader_will_see():
    event = settled(ev.Queued("a", b"", SamplingParams(temperature=1), media=[]))
    assert event.media == () and type(event.sampling.temperature) is float

"""Tests that decoding returns the encoded records, and that invalid bytes raise the right errors."""

import struct
import tracemalloc
import zlib
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.errors import CorruptLog, ErrorCode
from mmengine.events import codec
from mmengine.events import vocabulary as ev
from mmengine.events.codec import (
    MAX_BODY,
    DamagedRecord,
    TornRecord,
    UnknownRecord,
    as_logged,
    encode,
    frame_at,
    records_in,
)
from mmengine.request import Adapter, GrammarRequest, MediaItem, Pooling, SamplingParams, ThinkingBudget
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
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
ADAPTER = st.builds(Adapter, BYTES, INTS, st.booleans(), TEXT)
THINKING = st.builds(ThinkingBudget, st.integers(0, 9), st.booleans(), IDS, IDS.filter(len))
GRAMMAR = st.builds(GrammarRequest, TEXT, TEXT, IDS, st.sampled_from(["length", "close"]))
FIELDS = {
    ev.Started: (
        INTS,
        TEXT,
        INTS,
        st.dictionaries(TEXT, SETTINGS, max_size=3),
        st.dictionaries(TEXT, TEXT),
        INTS,
        st.builds(ev.FoldConstants, *(st.booleans() for _ in range(4)), INTS),
        st.booleans(),
        TEXT,
    ),
    ev.Queued: (
        *(TEXT, BYTES, SAMPLING, st.lists(MEDIA, max_size=2).map(tuple), INTS, INTS, TEXT, INTS),
        *(st.none() | GRAMMAR, TEXT, INTS, BYTES, st.none() | THINKING, BYTES, st.none() | ADAPTER, TEXT),
        st.none() | st.builds(Pooling, st.sampled_from(["embed", "logits"]), IDS),
    ),
    ev.Fetched: (TEXT, BYTES, BYTES),
    ev.Arrived: (TEXT, BYTES),
    ev.AdapterLoaded: (ADAPTER, TEXT),
    **dict.fromkeys((ev.GrammarReady, ev.Failed, ev.Delivered, ev.AdapterUnloaded), (TEXT,)),
    ev.Offered: (TEXT, INTS, st.lists(st.tuples(INTS, BYTES), max_size=2).map(tuple)),
    **dict.fromkeys((ev.GrammarFailed, ev.Cancelled, ev.Lost, ev.SessionClosed, ev.Noted), (TEXT, TEXT)),
    ev.Preempted: (TEXT, INTS, TEXT, TEXT, BYTES, INTS, INTS),
    ev.Scheduled: (
        *(st.none() | BYTES, st.none() | BYTES, BYTES, WORK, KEYS),
        *(st.none() | BYTES, st.none() | BYTES, INTS, st.none() | BYTES),
    ),
    ev.Admitted: (
        *(TEXT, INTS, INTS, BYTES, BYTES, WORK, KEYS, INTS),
        st.none() | st.tuples(INTS, INTS),
        st.booleans(),
    ),
    **dict.fromkeys((ev.StatesKept, ev.Checkpoint, ev.Drafted), (BYTES, BYTES, BYTES)),
    ev.Evicted: (KEYS, KEYS),
    ev.Encoded: (TEXT, INTS, INTS, KEYS),
    ev.Dispatched: (),
    ev.Recovered: (
        *(st.lists(st.integers(0, 2**40), max_size=2).map(tuple), TEXT),
        st.lists(st.tuples(TEXT, st.integers(0, 2**40), st.integers(0, 2**40)), max_size=2).map(tuple),
        st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple),
        st.dictionaries(TEXT, TEXT, max_size=2),
        TEXT,
    ),
    ev.Executed: (
        *(BYTES, PAIRS, PAIRS, LOGPROBS.map(tuple), INTS),
        *(st.none() | BYTES, BYTES, st.none() | BYTES, st.none() | BYTES, INTS, INTS),
        st.lists(st.tuples(INTS, INTS, BYTES, BYTES), max_size=3).map(tuple),
        st.lists(st.tuples(INTS, BYTES, BYTES), max_size=3).map(tuple),
    ),
    ev.SessionOpened: (TEXT, TEXT, INTS, BYTES),
    ev.Appended: (TEXT, TEXT, INTS, INTS, st.booleans(), INTS),
    ev.Leased: (TEXT, INTS, BYTES),
    ev.LeaseTaken: (TEXT, INTS, TEXT),
    ev.Stalled: (TEXT, TEXT, TEXT),
    ev.Finished: (TEXT, TEXT, TEXT, st.none() | st.sampled_from(ErrorCode)),
    ev.CacheReset: (st.booleans(),),
}
FIELDS[ev.AdmittedWithState] = (*FIELDS[ev.Admitted], INTS, INTS, INTS)
FIELDS[ev.AdmittedWithAdapter] = (*FIELDS[ev.AdmittedWithState], KEYS)
EVENTS = st.one_of(*(st.builds(cls, *fields) for cls, fields in FIELDS.items()))
HUGE = 2**32 - 1


def framed(body: bytes, *, count: int = 1, length: int | None = None, start=(0, 0, 0)) -> bytes:
    """Return a frame with this body and a valid checksum."""
    checked = struct.pack("<IIQQQ", len(body) if length is None else length, count, *start) + body
    return codec.MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked


def record_of(body: bytes, *, number: int = 8, **fields) -> bytes:
    """Return a frame with a record. `body`: the event's encoded fields. `number`: the event's type number."""
    return framed(b"\x91\x94" + msgspec.msgpack.encode(number) + b"\0\0" + body, **fields)


def read(data: bytes, offset: int = 0) -> list:
    """Return the records in the frame at `offset`."""
    return codec.records_in(data, frame_at(data, offset))


def one_record(event: ev.Event, sequence: int = 0, step: int = 0, mono_ns: int = 0) -> bytes:
    (frame,) = encode([(ev.NUMBERS[type(event)], step, mono_ns, event)], sequence)
    return frame


def test_every_type_is_drawn():
    assert set(FIELDS) == set(ev.TYPES.values())
    assert all(len(fields) == len(cls.__struct_fields__) for cls, fields in FIELDS.items())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(EVENTS, *(st.integers(0, 2**64 - 1) for _ in range(3)), st.binary(max_size=5))
def test_round_trip(event, sequence, step, mono_ns, before):
    data = before + one_record(event, sequence, step, mono_ns)
    frame = frame_at(data + b"more", len(before))
    (record,) = records_in(data + b"more", frame)
    assert (record.event, type(record.event)) == (event, type(event))
    assert (record.sequence, record.step, record.mono_ns) == (sequence, step, mono_ns)
    assert (record.offset, frame.end) == (len(before), len(data))
    assert as_logged(event) == event


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 2**62), st.integers(0, 2**62)), min_size=1, max_size=6))
def test_records_of_one_commit_keep_their_own_steps_and_times(given):
    (data,) = encode([(ev.NUMBERS[type(event)], step, ns, event) for event, step, ns in given], 7)
    records = read(data)
    assert [(record.event, record.step, record.mono_ns) for record in records] == given
    assert [record.sequence for record in records] == list(range(7, 7 + len(given)))


def test_a_commit_above_the_limit_of_a_body_becomes_several_frames(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BODY", 300)
    given = [(8, 1, 2, ev.Failed("x" * 90)) for _ in range(7)]
    frames = encode(given, 3)
    assert len(frames) == 3 and all(len(frame) <= 340 for frame in frames)
    records = [record for frame in frames for record in read(frame)]
    assert [record.sequence for record in records] == list(range(3, 10))
    with pytest.raises(ValueError, match="record 5 needs .* bytes"):
        encode([(8, 0, 0, ev.Failed("x" * 400))], 5)


def test_a_commit_of_very_many_records_becomes_several_frames():
    frames = encode([(11, 0, 0, ev.CacheReset())] * 100_000, 0)
    assert len(frames) == 8 and sum(len(read(frame)) for frame in frames) == 100_000
    tiny = b"\xdd" + struct.pack(">I", 20_000) + b"\x94\x0b\0\0\x90" * 20_000
    tracemalloc.start()
    try:
        with pytest.raises(UnknownRecord, match="not a list of records"):
            read(framed(tiny, count=20_000))
        assert tracemalloc.get_traced_memory()[1] < 3 * len(tiny)
    finally:
        tracemalloc.stop()


def test_logprobs_need_not_be_numbers():
    event = ev.Executed(b"", logprobs=((0, ((1, float("nan")), (2, float("-inf")))),))
    data = one_record(event)
    assert one_record(read(data)[0].event) == data


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(ev.TYPES)), st.binary(max_size=60))
def test_a_body_of_anything_is_read_or_refused(number, body):
    with suppress(UnknownRecord):
        read(record_of(body, number=number))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(one_of_each()), st.data())
def test_a_body_with_some_bytes_changed_is_read_or_refused(event, data):
    body = bytearray(msgspec.msgpack.encode(event))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(UnknownRecord):
        read(record_of(bytes(body), number=ev.NUMBERS[type(event)]))


def test_type_numbers_and_fields_are_for_ever():
    """Since 0.1.0, new fields come last and have a default. Only extend this test."""
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
    assert read(record_of(later, number=9))[0].event == ev.Finished("a", "stop", "eos")
    earlier = msgspec.msgpack.encode(known[:2])
    assert read(record_of(earlier, number=9))[0].event == ev.Finished("a", "stop", "")


@pytest.mark.parametrize("number", [0, 100, 255, -1, 2**40])
def test_a_newer_event_type_is_named(number):
    with pytest.raises(UnknownRecord, match=f"event type {number} is newer"):
        read(record_of(b"\x91\xa0", number=number))


def test_wrong_magic():
    data = bytearray(one_record(ev.CacheReset()))
    data[0] ^= 1
    with pytest.raises(DamagedRecord, match="byte 0 is damaged"):
        frame_at(data, 0)


def test_a_length_over_the_limit_is_damage_and_one_below_it_a_cut():
    with pytest.raises(DamagedRecord, match="3000000000 bytes") as error:
        frame_at(framed(b"", length=3_000_000_000), 0)
    assert error.value.kind == "oversize"
    with pytest.raises(TornRecord):
        frame_at(framed(b"", length=MAX_BODY), 0)


@pytest.mark.parametrize("count", [0, 2, 2**32 - 1])
def test_a_count_that_lies(count):
    with pytest.raises(UnknownRecord, match=f"claims {count} records and holds 1"):
        read(record_of(b"\x91\xa0", count=count))


@pytest.mark.parametrize("steps, ns", [(-1, 0), (0, -1), (2**64, 0), (1, 2**63)])
def test_a_step_or_time_out_of_range(steps, ns):
    if steps == 2**64:  # too large for msgpack, so the header and the record each add 2**63
        data = framed(msgspec.msgpack.encode([(8, 2**63, 0, ("",))]), start=(0, 2**63, 0))
    else:
        data = framed(msgspec.msgpack.encode([(8, steps, ns, ("",))]), start=(0, 0, 2**63 if ns > 0 else 0))
    with pytest.raises(UnknownRecord, match="out of range"):
        read(data)


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
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_an_outline_that_lies_is_refused_without_memory():
    # The body claims a list with HUGE records.
    for body in (b"\xdd" + struct.pack(">I", HUGE), b"\xdd" + struct.pack(">I", HUGE) + b"\x94" * 1000):
        tracemalloc.start()
        try:
            with pytest.raises(UnknownRecord, match="not a list of records"):
                read(framed(body))
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
def test_as_logged_refuses_values_that_would_change(event):
    with pytest.raises(ValueError):
        as_logged(event)


def test_as_logged_refuses_a_long_event(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BODY", 100)
    with pytest.raises(ValueError, match="more than 100"):
        as_logged(ev.Failed("x" * 100))


def test_as_logged_returns_the_readers_types():
    event = as_logged(ev.Queued("a", b"", SamplingParams(temperature=1), media=[]))
    assert event.media == () and type(event.sampling.temperature) is float


def test_quotes_from_a_log_cannot_control_the_terminal():
    sampling = {"\x1b[31mmax_\ntokens": 1}
    body = msgspec.msgpack.encode(["a", b"", sampling])
    with pytest.raises(UnknownRecord, match="not a Queued") as error:
        read(record_of(body, number=2))
    assert str(error.value).isprintable() and "max_" in str(error.value)


@pytest.mark.parametrize("field", ["stops", "runs"])
def test_a_body_of_very_many_tiny_values_is_refused_without_memory(field, monkeypatch):
    monkeypatch.setattr(codec, "MAX_VALUES", 10**5)
    many = b"\xdd" + struct.pack(">I", 10**6) + b"\x92\x00\xa0" * 10**6
    if field == "runs":
        item = b"\x91\x94\xc4\0\xa5image" + many + b"\x93\1\1\1"
        body, number = b"\x94\xa1a\xc4\0\x80" + item, 2
    else:
        body, number = b"\x92\xc4\0" + many, 7
    data = record_of(body, number=number)
    tracemalloc.start()
    try:
        with pytest.raises(UnknownRecord, match="it holds more than"):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    finally:
        tracemalloc.stop()


def test_values_are_counted_as_msgpack_lays_them_out(monkeypatch):
    # `count` is the expected number: a list or dict counts as 1, plus its entries, keys and values.
    monkeypatch.setattr(codec, "LARGE", 0)
    shapes = [None, True, 5, -3, 300, 2**40, -(2**40), 1.5, "short", "x" * 40, "x" * 300, "x" * 70_000]
    shapes += [b"a", b"a" * 300, b"a" * 70_000, [1] * 20, list(range(70_000)), {"a": [1, {"b": 2.0}]}]
    shapes += [{str(n): n for n in range(20)}, [[], {}, [[]]]]

    def count(value):
        if isinstance(value, dict):
            return 1 + sum(count(key) + count(each) for key, each in value.items())
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    for shape in shapes:
        body = msgspec.msgpack.encode(shape)
        monkeypatch.setattr(codec, "MAX_VALUES", count(shape))
        assert not codec.has_too_many_values(body), shape
        monkeypatch.setattr(codec, "MAX_VALUES", count(shape) - 1)
        assert codec.has_too_many_values(body), shape

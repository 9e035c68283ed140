"""Reading a folder: nothing false ever comes out, a cut tail is reported, damage is refused."""

import random

import pytest

from mmengine.errors import CorruptLog, LogError
from mmengine.events import codec, log
from mmengine.events import vocabulary as ev
from mmengine.events.codec import HEADER, encode
from mmengine.events.log import LogReader
from tests.events.logs import one_of_each, read_events, segments, write_log


def offsets(path):
    return [record.offset for record in LogReader(path)]


@pytest.fixture
def single(tmp_path):
    """A log of one segment: its path, bytes and events."""
    folder = write_log(tmp_path / "single", one_of_each())
    (path,) = segments(folder)
    return path, path.read_bytes(), one_of_each()


@pytest.fixture
def several(tmp_path):
    """A log of several segments."""
    folder = write_log(tmp_path / "several", one_of_each() * 3, segment_bytes=500)
    assert len(segments(folder)) > 4
    return folder


def test_all_comes_back_in_order(several):
    records = list(LogReader(several))
    assert [record.event for record in records] == one_of_each() * 3
    assert [record.sequence for record in records] == list(range(len(records)))
    assert [record.step for record in records] == [number // 3 for number in range(len(records))]
    assert [record.mono_ns for record in records] == [1000 + number for number in range(len(records))]
    assert LogReader(several).num_bytes == sum(path.stat().st_size for path in segments(several))


def test_a_cut_at_every_byte(single):
    path, data, events = single
    starts = [*offsets(path.parent), len(data)]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        reader = LogReader(path.parent)
        whole = max(number for number, start in enumerate(starts) if start <= cut)
        assert [record.event for record in reader] == events[:whole]
        if cut == starts[whole]:
            assert reader.torn is None
        else:
            torn = (reader.torn.path, reader.torn.offset, reader.torn.num_bytes)
            assert torn == (path, starts[whole], cut - starts[whole])


def test_a_tail_of_zeros_is_torn(single):
    path, data, events = single
    path.write_bytes(data + bytes(4096))
    reader = LogReader(path.parent)
    assert [record.event for record in reader] == events
    assert (reader.torn.offset, reader.torn.num_bytes) == (len(data), 4096)


def test_two_thousand_flipped_bits(single):
    path, data, events = single
    starts = offsets(path.parent)
    rng = random.Random(7)
    torn = 0
    for _ in range(2000):
        bit = rng.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        reader, got = LogReader(path.parent), []
        hit = max(number for number, start in enumerate(starts) if start <= bit // 8)
        if hit < len(events) - 1:
            with pytest.raises(CorruptLog, match=f"{path.name}.*byte {starts[hit]}"):
                got += (record.event for record in reader)
        else:
            got = [record.event for record in reader]
            assert reader.torn.offset == starts[hit]
            torn += 1
        assert got == events[:hit]
    assert torn > 10


def test_a_length_that_reaches_past_the_end_is_no_cut_when_records_follow(single):
    path, data, _ = single
    length = HEADER.unpack_from(data, 0)[4]
    path.write_bytes(data[:8] + (length + 2**20).to_bytes(4, "little") + data[12:])
    with pytest.raises(CorruptLog, match="byte 0 is cut short"):
        list(LogReader(path.parent))


def test_a_cut_before_the_last_segment_is_refused(several):
    path = segments(several)[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptLog, match=f"{path.name}: the record at byte .* is cut short"):
        list(LogReader(several))


def test_damage_before_the_last_segment_is_refused_even_at_its_end(several):
    path = segments(several)[1]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CorruptLog, match=path.name):
        list(LogReader(several))


@pytest.mark.parametrize("gone", [0, 2])
def test_a_missing_segment_is_a_gap(several, gone):
    path, after = segments(several)[gone : gone + 2]
    path.unlink()
    with pytest.raises(CorruptLog, match=f"{after.name}, byte 0: .* belongs; records are missing"):
        list(LogReader(several))


def test_a_segment_that_stands_twice_is_refused(several):
    first, *_, last = segments(several)
    (several / "99999999999999999999.mmlog").write_bytes(last.read_bytes())
    with pytest.raises(CorruptLog, match="not in order"):
        list(LogReader(several))


def test_an_emptied_segment_is_a_gap(several):
    segments(several)[2].write_bytes(b"")
    with pytest.raises(CorruptLog, match="records are missing"):
        list(LogReader(several))


def test_an_empty_last_segment_is_fine(several):
    (several / "99999999999999999999.mmlog").write_bytes(b"")
    assert len(read_events(several)) == 3 * len(one_of_each())


def test_links_are_not_followed(several, tmp_path):
    path = segments(several)[2]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptLog, match="records are missing"):
        list(LogReader(several))


@pytest.mark.parametrize("made", ["nothing", "empty", "other files", "link", "folder"])
def test_what_is_no_log(tmp_path, several, made):
    folder = tmp_path / "none"
    if made != "nothing":
        folder.mkdir()
    if made == "other files":
        (folder / "notes.txt").write_text("x")
    if made == "link":
        (folder / segments(several)[0].name).symlink_to(segments(several)[0])
    if made == "folder":
        (folder / "0.mmlog").mkdir()
    with pytest.raises(LogError, match="holds no log"):
        LogReader(folder)


@pytest.mark.parametrize("newer", [{"fmt": 2}, {"number": 99}])
@pytest.mark.parametrize("last", [True, False])
def test_records_of_a_newer_build_are_never_taken_for_a_torn_tail(single, newer, last):
    from tests.events.test_events_codec import record_of

    path, data, _ = single
    after = b"" if last else encode(ev.CacheReset(), 99, 0, 0)
    path.write_bytes(data + record_of(b"\x90", **newer) + after)
    with pytest.raises(CorruptLog, match="newer than this build knows"):
        list(LogReader(path.parent))


def test_a_log_wholly_of_a_newer_format_says_so(single):
    from tests.events.test_events_codec import record_of

    path, _, _ = single
    path.write_bytes(record_of(b"\x90", fmt=2) * 5)
    with pytest.raises(CorruptLog, match="format 2 type 8 is newer"):
        list(LogReader(path.parent))


def test_a_segment_of_absurd_size_is_refused_before_it_is_read(single):
    path, _, _ = single
    with path.open("r+b") as file:
        file.truncate(2**40)  # sparse: no byte is on the disk
    with pytest.raises(CorruptLog, match="1099511627776 bytes"):
        list(LogReader(path.parent))


def test_too_many_segments_are_refused(single, monkeypatch):
    monkeypatch.setattr(log, "MAX_SEGMENTS", 3)
    for number in range(4):
        (single[0].parent / f"{number}.mmlog").write_bytes(b"")
    with pytest.raises(LogError, match="more than 3 segments"):
        LogReader(single[0].parent)


def test_false_beginnings_of_records_cost_no_quadratic_time(single, monkeypatch):
    """Many bytes that look like headers, each with a long body to check."""
    path, data, _ = single
    fakes = 2000
    junk = b"".join(
        HEADER.pack(codec.MAGIC, 1, 8, 0, (fakes - number) * HEADER.size - HEADER.size, 0, 0, 0, 0)
        for number in range(fakes)
    )
    path.write_bytes(data + junk)
    tries = []
    monkeypatch.setattr(log, "decode_at", lambda *given: tries.append(1) or codec.decode_at(*given))
    with pytest.raises(CorruptLog):
        list(LogReader(path.parent))
    assert len(tries) < 30

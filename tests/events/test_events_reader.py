"""Tests reading a log's folder: no wrong record is returned, a torn tail is reported, and damage raises
CorruptLog.
"""

import os
import zlib

import pytest

from mmengine.errors import CorruptLog, LogError
from mmengine.events import codec, segment
from mmengine.events import vocabulary as ev
from mmengine.events.codec import HEADER
from mmengine.events.fsck import fsck
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.segment import FOOTER_SIZE, HEADER_SIZE
from tests.events.logs import one_of_each, read_events, segments, write_log
from tests.events.test_events_codec import one_record, record_of


@pytest.fixture
def single(tmp_path):
    """Return the path, the bytes and the events of a log with one segment. The segment has no footer,
    as after a kill.
    """
    folder = write_log(tmp_path / "single", one_of_each())
    (path,) = segments(folder)
    data = path.read_bytes()[:-FOOTER_SIZE]
    path.write_bytes(data)
    return path, data, one_of_each()


@pytest.fixture
def closed(tmp_path):
    """Return the same as `single`, for a log that its writer closed."""
    (path,) = segments(write_log(tmp_path / "closed", one_of_each()))
    return path, path.read_bytes(), one_of_each()


@pytest.fixture
def several(tmp_path):
    """Return a log with several segments."""
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


def ends_of(path):
    """Return the offset of each frame in an undamaged segment, and the end of the last frame."""
    data = path.read_bytes()
    scan = segment.Scan(data)
    return [frame.offset for frame in scan.frames()] + [len(data) - FOOTER_SIZE * scan.is_closed]


@pytest.mark.long
def test_a_cut_at_every_byte(closed):
    path, data, events = closed
    starts = ends_of(path)
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        reader = LogReader(path.parent)
        whole = max((number for number, start in enumerate(starts) if start <= cut), default=0)
        assert [record.event for record in reader] == events[:whole]
        assert not reader.recovery.is_closed
        end = starts[whole] if cut >= HEADER_SIZE else 0
        if cut == end:
            assert reader.torn is None
        else:
            torn = (reader.torn.path, reader.torn.offset, reader.torn.num_bytes, reader.torn.kind)
            assert torn == (path, end, cut - end, "truncated")


def test_a_closed_log_is_known_to_be_whole(closed, single):
    for (path, _, events), is_closed in ((closed, True), (single, False)):
        reader = LogReader(path.parent)
        assert [record.event for record in reader] == events
        assert reader.recovery.is_closed == is_closed and not reader.recovery.cuts


def test_a_tail_of_zeros_is_torn(single):
    path, data, events = single
    path.write_bytes(data + bytes(4096))
    reader = LogReader(path.parent)
    assert [record.event for record in reader] == events
    assert (reader.torn.offset, reader.torn.num_bytes) == (len(data), 4096)


@pytest.mark.long
def test_no_bit_of_a_closed_log_flips_unseen(closed):
    """Because a footer follows, a damaged last record is not taken for a torn tail."""
    path, data, events = closed
    footer = len(data) - FOOTER_SIZE
    for byte in range(len(data)):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << byte % 8
        path.write_bytes(flipped)
        reader = LogReader(path.parent)
        if byte < footer:
            with pytest.raises(CorruptLog, match="damaged|cut short|format"):
                list(reader)
        else:
            assert [record.event for record in reader] == events
            assert reader.torn.offset == footer and not reader.recovery.is_closed


def test_a_segment_without_a_frame_in_the_middle_is_a_gap_and_one_at_its_end_contradicts_the_footer(closed):
    """Removes a frame from the middle of a segment, or the segment's last frame."""
    path, data, _ = closed
    starts = ends_of(path)
    path.write_bytes(data[: starts[3]] + data[starts[4] :])
    with pytest.raises(CorruptLog, match="record 4 was found instead of record 3") as error:
        list(LogReader(path.parent))
    assert error.value.kind == "gap"
    path.write_bytes(data[: starts[-2]] + data[starts[-1] :])
    reader = LogReader(path.parent)
    assert len(list(reader)) == len(starts) - 2 and "does not fit the records" in reader.torn.what
    with pytest.raises(CorruptLog, match="does not fit the records"):
        list(LogReader(path.parent, "strict"))


def test_a_length_that_reaches_past_the_end_is_no_cut_when_records_follow(single):
    path, data, _ = single
    length = HEADER.unpack_from(data, HEADER_SIZE)[2]
    at = HEADER_SIZE + 8
    path.write_bytes(data[:at] + (length + 2**20).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CorruptLog, match=f"byte {HEADER_SIZE} is cut short") as error:
        list(LogReader(path.parent))
    assert error.value.kind == "length"


def test_a_cut_before_the_last_segment_is_refused(several):
    path = segments(several)[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptLog, match=f"{path.name}: the footer at byte .* is cut short"):
        list(LogReader(several))


def test_damage_before_the_last_segment_is_refused_even_at_its_end(several):
    path = segments(several)[1]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))
    with pytest.raises(CorruptLog, match=path.name):
        list(LogReader(several))


@pytest.mark.parametrize("gone", [0, 2])
def test_a_missing_segment_is_a_gap(several, gone):
    path, after = segments(several)[gone : gone + 2]
    path.unlink()
    what = f"{after.name}, byte 64: .*; records are missing" if gone else "begins with record"
    with pytest.raises(CorruptLog, match=what) as error:
        list(LogReader(several))
    assert error.value.kind == "gap"


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
    with pytest.raises(CorruptLog, match=f"{path.name} is a link") as error:
        LogReader(several)
    assert error.value.kind == "link"


def test_a_file_replaced_by_a_link_is_not_followed(several, tmp_path):
    reader, path = LogReader(several), segments(several)[2]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LogError, match="cannot be read"):
        list(reader)


@pytest.mark.timeout(20)
def test_a_pipe_is_no_segment(several):
    reader, path = LogReader(several), segments(several)[2]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptLog, match="not a regular file"):
        list(reader)


@pytest.mark.parametrize("made", ["nothing", "empty", "other files", "folder"])
def test_folders_without_a_log_are_refused(tmp_path, made):
    folder = tmp_path / "none"
    if made != "nothing":
        folder.mkdir()
    if made == "other files":
        (folder / "notes.txt").write_text("x")
    if made == "folder":
        (folder / "0.mmlog").mkdir()
    with pytest.raises(LogError, match="has no log"):
        LogReader(folder)


@pytest.mark.parametrize("last", [True, False])
def test_records_of_a_newer_build_are_never_taken_for_a_torn_tail(single, last):
    path, data, events = single
    after = b"" if last else one_record(ev.CacheReset(), 99)
    path.write_bytes(data + record_of(b"\x90", number=99, start=(len(events), 0, 0)) + after)
    with pytest.raises(CorruptLog, match="newer than this build knows") as error:
        list(LogReader(path.parent))
    assert error.value.kind == "version"


@pytest.mark.parametrize("mode", ["strict", "tail", "salvage"])
def test_a_log_of_a_newer_format_says_so(single, mode):
    path, data, _ = single
    block = data[:8] + (7).to_bytes(2, "little") + data[10 : HEADER_SIZE - 4]
    path.write_bytes(block + zlib.crc32(block).to_bytes(4, "little") + data[HEADER_SIZE:])
    with pytest.raises(CorruptLog, match="format 7 is newer") as error:
        list(LogReader(path.parent, mode))
    assert error.value.kind == "version"


@pytest.mark.parametrize("magic", [b"MMELOG\r\n", b"MMEV"])
@pytest.mark.parametrize("mode", ["strict", "tail", "salvage"])
def test_a_log_of_a_build_before_the_first_release_is_refused_in_one_sentence(single, mode, magic):
    path, data, _ = single
    path.write_bytes(magic + data[len(magic) :])
    sentence = "this log was written before 0.1.0; read it with the build that wrote it"
    for read in (lambda: list(LogReader(path.parent, mode)), lambda: LogWriter(path.parent, reopen=mode)):
        with pytest.raises(CorruptLog) as error:
            read()
        assert str(error.value) == sentence and error.value.kind == "version"
    assert [finding.text for finding in fsck(path.parent).findings] == [sentence]
    assert fsck(path.parent).exit_code == 8


def test_a_segment_of_absurd_size_is_refused_before_it_is_read(single):
    path, _, _ = single
    with path.open("r+b") as file:
        file.truncate(2**40)  # sparse: no byte is on the disk
    with pytest.raises(CorruptLog, match="1099511627776 bytes"):
        list(LogReader(path.parent))


def test_too_many_segments_are_refused(single, monkeypatch):
    monkeypatch.setattr(segment, "MAX_SEGMENTS", 3)
    for number in range(4):
        (single[0].parent / f"{number}.mmlog").write_bytes(b"")
    with pytest.raises(LogError, match="more than 3 segments"):
        LogReader(single[0].parent)


def test_false_beginnings_of_records_cost_no_quadratic_time(single, monkeypatch):
    """Each of 2,000 fake frame headers claims a long body, whose checksum would have to be computed."""
    path, data, _ = single
    fakes, size = 2000, HEADER.size

    def fake(number):
        length = (fakes - number) * size - size
        return HEADER.pack(codec.MAGIC, 0, length, 1, 0, 0, 0)

    path.write_bytes(data + b"".join(map(fake, range(fakes))))
    tries, real = [], segment.frame_at
    monkeypatch.setattr(segment, "frame_at", lambda *given: tries.append(1) or real(*given))
    with pytest.raises(CorruptLog, match=f"{path.name}: .*made to look like records"):
        list(LogReader(path.parent))
    assert len(tries) < 50


def test_reading_from_a_record_on(several):
    events = one_of_each() * 3
    for start in range(0, len(events) + 2, 5):
        records = list(LogReader(several, start=start))
        assert [record.event for record in records] == events[start:]
        assert not records or records[0].sequence == start
    reader = LogReader(several, start=len(events) - 1)
    segments(several)[0].write_bytes(b"not looked at")
    assert len(list(reader)) == 1


@pytest.mark.parametrize("held, reads", [(None, False), (2, False), (3, True), (17, True)])
def test_a_log_may_begin_after_a_snapshot(tmp_path, held, reads):
    """A log that begins with record 4 needs a snapshot of the state after record 3 or later."""
    folder = write_log(tmp_path / "log", [ev.Failed(str(n)) for n in range(12)], segment_bytes=360)
    first = segments(folder)[1]
    assert int(first.stem) == 4
    segments(folder)[0].unlink()
    if held is not None:
        (folder / f"snapshot-{held:020d}.mmsnap").write_bytes(b"")
    if not reads:
        with pytest.raises(CorruptLog, match="begins with record 4, and no snapshot"):
            LogReader(folder)
        return
    reader = LogReader(folder)
    assert reader.first_sequence == 4
    assert [record.sequence for record in reader] == list(range(4, 12))

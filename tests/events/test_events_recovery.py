"""Tests the recovery modes strict, tail and salvage, for reading a log and for continuing a log."""

import random

import pytest

from mmengine.errors import CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.retention import pack
from mmengine.events.segment import FOOTER_SIZE
from mmengine.replay import verify
from tests.events.logs import read_events, segments, write_log
from tests.replay.runs import busy_run

NAMES = [ev.Failed(f"number {n}") for n in range(12)]


def names(folder, mode="tail"):
    return [int(record.event.error.split()[1]) for record in LogReader(folder, mode)]


@pytest.fixture
def log(tmp_path):
    """Return a log with twelve records, three in each segment."""
    folder = write_log(tmp_path / "log", NAMES, segment_bytes=320)
    assert [int(path.stem) for path in segments(folder)] == [0, 3, 6, 9]
    return folder


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def record_places(folder):
    """Return (path, offset) for each record's frame."""
    return [(path, r.offset) for path in segments(folder) for r in LogReader(folder) if _stands_in(path, r)]


def _stands_in(path, record):
    first = int(path.stem)
    return first <= record.sequence < first + 3


@pytest.mark.parametrize("mode", ["strict", "tail"])
def test_damage_in_the_middle_is_refused(log, mode):
    path, offset = record_places(log)[4]
    flip(path, offset + 50)
    with pytest.raises(CorruptLog, match=f"{path.name}: the record at byte {offset} is damaged"):
        list(LogReader(log, mode))


def test_salvage_skips_damage_and_reports_losses(log):
    path, offset = record_places(log)[4]
    flip(path, offset + 50)
    reader = LogReader(log, "salvage")
    assert [record.sequence for record in reader] == [n for n in range(12) if n != 4]
    (cut,) = reader.recovery.cuts
    assert (cut.path, cut.offset, cut.kind, cut.first_lost, cut.num_lost) == (path, offset, "checksum", 4, 1)
    assert cut.num_bytes == record_places_after(log, path, offset) - offset
    assert reader.torn is None and (reader.recovery.num_lost, reader.recovery.next_sequence) == (1, 12)


def record_places_after(folder, path, offset):
    return min(r.offset for r in LogReader(folder, "salvage") if r.offset > offset and _stands_in(path, r))


@pytest.mark.parametrize(
    "damage, lost",
    [
        (lambda paths: paths[1].unlink(), [3, 4, 5]),
        (lambda paths: paths[0].unlink(), [0, 1, 2]),
        (lambda paths: paths[1].write_bytes(b""), [3, 4, 5]),
        (lambda paths: paths[1].write_bytes(b"no log at all" * 20), [3, 4, 5]),
        (lambda paths: flip(paths[1], 3), []),  # damages only the header
        (lambda paths: paths[1].write_bytes(paths[1].read_bytes()[:150]), [4, 5]),
        (lambda paths: flip(paths[1], paths[1].stat().st_size - 5), []),  # damages only the footer
        (lambda paths: flip(paths[3], 100), [9]),
    ],
)
def test_salvage_of_worse(log, damage, lost):
    # `lost`: the records that `salvage` cannot read. `strict` refuses the log.
    damage(segments(log))
    reader = LogReader(log, "salvage")
    first = [record.sequence for record in reader]
    assert first == [n for n in range(12) if n not in lost]
    told = [n for cut in reader.recovery.cuts for n in range(cut.first_lost, cut.first_lost + cut.num_lost)]
    assert told == (lost if lost != [0, 1, 2] else [])  # a reader cannot know that the beginning is lost
    with pytest.raises(CorruptLog):
        list(LogReader(log, "strict"))


def test_salvage_goes_on_without_a_segment_that_cannot_be_unpacked(log):
    pack(segments(log)[1])
    (packed,) = log.glob("*.zst")
    flip(packed, packed.stat().st_size // 2)
    with pytest.raises(CorruptLog, match="cannot be unpacked"):
        list(LogReader(log))
    reader = LogReader(log, "salvage")
    assert [record.sequence for record in reader] == [0, 1, 2, *range(6, 12)]
    assert [(cut.path, cut.num_lost) for cut in reader.recovery.cuts] == [(packed, 0), (segments(log)[1], 3)]


def test_salvage_takes_no_record_twice(log):
    (log / f"{20:020d}.mmlog").write_bytes(segments(log)[1].read_bytes())
    reader = LogReader(log, "salvage")
    assert [record.sequence for record in reader] == list(range(12))
    assert len(reader.recovery.cuts) == 3 and not reader.recovery.num_lost


def test_strict_wants_a_footer_of_every_segment_but_the_last(log):
    assert names(log, "strict") == list(range(12))
    first, *_, last = segments(log)
    last.write_bytes(last.read_bytes()[:-FOOTER_SIZE])
    assert names(log, "strict") == list(range(12))
    first.write_bytes(first.read_bytes()[:-FOOTER_SIZE])
    assert names(log) == list(range(12)), "the sequences show that no record is missing"
    with pytest.raises(CorruptLog, match="no footer"):
        names(log, "strict")


def test_a_word_that_is_no_mode(log):
    for use in (lambda: LogReader(log, "lenient"), lambda: LogWriter(log, reopen="lenient")):
        with pytest.raises(LogError, match="unknown recovery mode .*; use strict, tail, salvage"):
            use()


# Continued logs


def go_on(folder, mode="tail", **options):
    """Continue the log with the records 100 and 101. Return the writer's recovery report."""
    writer = LogWriter(folder, reopen=mode, **options)
    for number in (100, 101):
        writer.append(ev.Failed(f"number {number}"), 0, 0)
        assert writer.commit()
    writer.close()
    return writer.recovery


@pytest.mark.parametrize("mode", ["strict", "tail", "salvage"])
def test_a_closed_log_goes_on(log, mode):
    recovery = go_on(log, mode)
    assert names(log, "strict") == [*range(12), 100, 101]
    assert not recovery.cuts and recovery.next_sequence == 12
    assert [record.sequence for record in LogReader(log)] == list(range(14))


def test_a_new_folder_is_begun(tmp_path):
    assert go_on(tmp_path / "log").next_sequence == 0
    assert names(tmp_path / "log") == [100, 101]


@pytest.mark.long
def test_a_log_cut_at_every_byte_goes_on(tmp_path):
    """A truncated log keeps its complete records, and new records follow without a gap."""
    source = write_log(tmp_path / "source", NAMES[:3])
    data = segments(source)[0].read_bytes()
    ends = [record.offset for record in LogReader(source)][1:] + [len(data) - FOOTER_SIZE]
    for cut in range(len(data) + 1):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / segments(source)[0].name).write_bytes(data[:cut])
        recovery = go_on(folder, pack_full=False)
        whole = sum(end <= cut for end in ends)
        assert names(folder, "strict") == [*range(whole), 100, 101], cut
        torn = cut not in (0, len(data)) and cut not in ends and cut != 64
        assert len(recovery.cuts) == torn and recovery.next_sequence == whole
        assert sum(path.stat().st_size for path in folder.glob("*.cut")) == recovery.num_bytes


def test_strict_refuses_to_continue_a_torn_log(log):
    path = segments(log)[-1]
    path.write_bytes(path.read_bytes()[:-70])
    before = path.read_bytes()
    with pytest.raises(CorruptLog, match="cut short"):
        LogWriter(log, reopen="strict")
    assert path.read_bytes() == before
    go_on(log, "tail")  # works because the refused writer has released the lock


@pytest.mark.parametrize("mode", ["strict", "tail", "salvage"])
def test_damage_inside_the_last_segment(log, mode):
    path, offset = record_places(log)[9]
    flip(path, offset + 50)
    before = path.read_bytes()
    if mode != "salvage":
        with pytest.raises(CorruptLog, match="damaged"):
            LogWriter(log, reopen=mode)
        assert path.read_bytes() == before
        return
    recovery = go_on(log, mode, pack_full=False)
    assert recovery.num_lost == 1 and path.read_bytes() == before, "the damaged segment is unchanged"
    assert names(log, "salvage") == [*range(9), 10, 11, 100, 101]


def test_a_killed_writer_leaves_files_that_do_not_matter(log):
    (log / "reserve").write_bytes(bytes(100))
    (log / f"{0:020d}.mmlog.zst.part").write_bytes(b"half")
    packed = log / f"{3:020d}.mmlog.zst"
    packed.write_bytes(b"was being written, under a name that it never had")
    go_on(log)
    assert names(log, "strict") == [*range(12), 100, 101]
    assert not list(log.glob("*.part")) and not (log / "reserve").exists()


def test_the_history_of_a_log_that_was_continued_often(tmp_path):
    """A log that is often truncated and continued keeps its complete records, in order."""
    rng, expected, folder = random.Random(5), [], tmp_path / "log"
    for life in range(25):
        writer = LogWriter(folder, reopen="tail", segment_bytes=rng.choice([300, 1000, 10**6]))
        for number in range(rng.randrange(6)):
            writer.append(ev.Failed(f"number {100 * life + number}"), 0, 0)
            writer.commit()
            expected.append(100 * life + number)
        writer.close()
        paths = segments(folder)
        if paths and rng.random() < 0.6:
            data = paths[-1].read_bytes()
            paths[-1].write_bytes(data[: rng.randrange(len(data))])
            expected = names(folder)
        assert names(folder) == expected
    assert len(expected) > 20


def test_a_run_reads_back_from_packed_segments(tmp_path):
    """A run's log in many packed segments verifies like the log in a single segment."""
    busy_run(tmp_path / "one", seed=3)
    records = list(LogReader(tmp_path / "one"))
    writer = LogWriter(tmp_path / "many", segment_bytes=4000)
    for record in records:
        writer.append(record.event, record.step, record.mono_ns)
        assert writer.commit()
    writer.close()
    assert len(list((tmp_path / "many").glob("*.zst"))) > 3
    assert read_events(tmp_path / "many") == [record.event for record in records]
    assert verify(tmp_path / "many").ok

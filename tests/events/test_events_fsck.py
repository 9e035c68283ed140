"""Tests that fsck reports each defect's kind and a single-line text, and repairs the tail on request."""

import struct
import zlib

import pytest

from mmengine.errors import LogError
from mmengine.events import snapshots
from mmengine.events import vocabulary as ev
from mmengine.events.codec import HEADER
from mmengine.events.fsck import KINDS, fsck
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.segment import FOOTER_SIZE, HEADER_SIZE
from tests.events.logs import one_of_each, read_events, segments, write_log
from tests.events.test_events_codec import record_of

COUNT = 3 * len(one_of_each())


@pytest.fixture
def log(tmp_path):
    """Return a closed log with several segments."""
    return write_log(tmp_path / "log", one_of_each() * 3, segment_bytes=800)


def edit(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data) or data)


def kill(folder):
    """Change the log as if its process was killed between two commits."""
    edit(segments(folder)[-1], lambda data: data[:-FOOTER_SIZE])


def truncate(folder):
    edit(segments(folder)[-1], lambda data: data[:-3])


def flip(folder):
    def change(data):
        data[HEADER_SIZE + 60] ^= 1

    edit(segments(folder)[1], change)


def lie(folder):
    """Set the first frame's length to more bytes than the segment has."""
    edit(segments(folder)[0], lambda data: data[:72] + struct.pack("<I", 10**6) + data[76:])


def claim_gigabytes(folder):
    claim = HEADER.pack(b"mmfr", 0, 3 * 10**9, 1, COUNT, 0, 0)
    edit(segments(folder)[-1], lambda data: data[:-FOOTER_SIZE] + claim)


def newer_format(folder):
    def change(data):
        block = bytes(data[:8]) + (9).to_bytes(2, "little") + bytes(data[10 : HEADER_SIZE - 4])
        return block + zlib.crc32(block).to_bytes(4, "little") + data[HEADER_SIZE:]

    edit(segments(folder)[1], change)


def newer_type(folder):
    record = record_of(b"\x90", number=99, start=(COUNT, 0, 0))
    edit(segments(folder)[-1], lambda data: data[:-FOOTER_SIZE] + record)


def huge_file(folder):
    with segments(folder)[1].open("r+b") as file:
        file.truncate(2**40)  # sparse


def link(folder):
    path = segments(folder)[1]
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def lose_the_last(folder):
    segments(folder)[-1].unlink()


def lose_the_last_three(folder):
    for path in segments(folder)[-3:]:
        path.unlink()


def empty_the_last(folder):
    segments(folder)[-1].write_bytes(b"")


def empty_the_only_one(folder):
    for path in segments(folder)[1:]:
        path.unlink()
    empty_the_last(folder)


def keep_a_state_from_behind(folder):
    """Write a valid snapshot for a record that is not in the log."""
    head = snapshots.HEADER.pack(snapshots.MAGIC, 1, 0, 0, 0)
    snapshots.snapshot_path(folder, COUNT + 7).write_bytes(head)


def cut_between_two_frames(folder):
    path = segments(folder)[-1]
    offset = list(LogReader(folder))[-1].offset
    edit(path, lambda data: data[:offset])


def lose_a_segment(folder):
    segments(folder)[1].unlink()


def lose_the_first(folder):
    segments(folder)[0].unlink()


def bomb(folder):
    import zstandard

    packed = zstandard.ZstdCompressor().compress(bytes(2**30))
    path = segments(folder)[1]
    path.with_name(path.name + ".zst").write_bytes(packed)
    path.unlink()


WRONG = {
    truncate: ("truncated", "cut short"),
    flip: ("checksum", "checksum does not match"),
    lie: ("length", "cut short"),
    claim_gigabytes: ("oversize", "claims 3000000000 bytes"),
    huge_file: ("oversize", "1099511627776 bytes"),
    bomb: ("oversize", "claims to hold 1073741824 bytes"),
    newer_format: ("version", "format 9 is newer"),
    newer_type: ("version", "type 99 is newer"),
    link: ("link", "is a link"),
    lose_a_segment: ("gap", "records are missing"),
    lose_the_first: ("gap", "begins with record"),
    lose_the_last: ("end", "says that another segment follows record"),
    lose_the_last_three: ("end", "says that another segment follows record"),
    empty_the_last: ("end", "says that another segment follows record"),
    empty_the_only_one: ("end", "all segments are empty"),
    keep_a_state_from_behind: ("end", "a snapshot holds the state after record 103"),
    kill: ("unclosed", "killed after record 95, or the file was cut there, between two frames"),
    cut_between_two_frames: ("unclosed", "killed after record 94, or the file was cut there"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_each_defect_is_named(log, wrong):
    wrong(log)
    report = fsck(log)
    kind, text = WRONG[wrong]
    assert report.findings[0].kind == kind and text in report.findings[0].text
    assert report.exit_code == KINDS[kind] and "\n" not in report.findings[0].text
    assert len(report.findings) == 1 + (wrong is newer_type), "`newer_type` also removes the footer"


def test_every_kind_has_a_code_of_its_own():
    assert len(set(KINDS.values())) == len(KINDS) and not {0, 1, 2, 3, 5} & set(KINDS.values())
    assert {kind for kind, _ in WRONG.values()} | {"locked"} == set(KINDS)


def test_all_that_is_wrong_is_told_in_one_go(log):
    flip(log)
    truncate(log)
    assert [finding.kind for finding in fsck(log).findings] == ["checksum", "truncated"]


def test_the_index_lists_the_segments(log):
    report = fsck(log)
    records = list(LogReader(log))
    assert report.exit_code == 0 and report.is_closed and len(report.segments) > 4
    assert report.end.text == "closed by its writer"
    assert sum(each.records for each in report.segments) == len(records) == COUNT
    for each in report.segments:
        inside = records[each.first_sequence : each.last_sequence + 1]
        assert each.records == len(inside) and each.format == 1
        assert (each.first_step, each.last_step) == (inside[0].step, inside[-1].step)
        assert (each.first_mono_ns, each.last_mono_ns) == (inside[0].mono_ns, inside[-1].mono_ns)
        assert each.queued == sum(isinstance(record.event, ev.Queued) for record in inside)
    for name, kind in (("finished", ev.Finished), ("delivered", ev.Delivered), ("queued", ev.Queued)):
        total = sum(isinstance(record.event, kind) for record in records)
        assert sum(getattr(each, name) for each in report.segments) == total > 0
    assert sum(each.tokens for each in report.segments) == 6


def test_a_repair_cuts_the_tail_keeps_its_bytes_and_closes_the_log(log):
    kill(log)
    whole = segments(log)[-1].read_bytes()
    edit(segments(log)[-1], lambda data: data + b"mmfr and no more")
    report = fsck(log, repair=True)
    assert report.exit_code == 0 and report.is_closed and "closed by a repair" in report.end.text
    (cut,) = report.repaired.cuts
    assert (cut.offset, cut.num_bytes, cut.kind) == (len(whole), 16, "truncated")
    (kept,) = log.glob("*.cut")
    assert kept.read_bytes() == b"mmfr and no more" and kept.stat().st_mode & 0o777 == 0o600
    assert segments(log)[-1].read_bytes()[:-FOOTER_SIZE] == whole
    assert read_events(log) == one_of_each() * 3
    again = fsck(log, repair=True)
    assert again.exit_code == 0 and not again.repaired.cuts


def test_a_repair_leaves_damage_in_the_middle_alone(log):
    flip(log)
    before = segments(log)[1].read_bytes()
    report = fsck(log, repair=True)
    assert report.exit_code == KINDS["checksum"] and segments(log)[1].read_bytes() == before
    assert report.is_closed


def test_two_writers(log):
    """While a writer has the log open, fsck accepts an unfinished tail, and refuses to repair."""
    writer = LogWriter(log, reopen="tail")
    writer.append(ev.CacheReset(), 0, 0)
    assert writer.commit()
    report = fsck(log)
    assert report.has_writer and report.exit_code == 0 and report.end.text == "a writer is at work"
    edit(segments(log)[-1], lambda data: data + b"MM")  # an unfinished write
    assert fsck(log).exit_code == 0
    refused = fsck(log, repair=True)
    assert refused.exit_code == KINDS["locked"] and "another process" in refused.findings[0].text
    writer.close()


def test_packed_segments_are_checked_too(tmp_path):
    writer = LogWriter(tmp_path / "log", segment_bytes=500)
    for event in one_of_each() * 3:
        writer.append(event, 0, 0)
        assert writer.commit()
    writer.close()
    report = fsck(tmp_path / "log")
    assert report.exit_code == 0 and report.is_closed
    packed = sorted((tmp_path / "log").glob("*.zst"))
    assert len(packed) == len(report.segments) - 1 > 3
    data = bytearray(packed[1].read_bytes())
    data[len(data) // 2] ^= 8
    packed[1].write_bytes(data)
    assert fsck(tmp_path / "log").findings[0].kind == "checksum"


def test_no_log(tmp_path):
    with pytest.raises(LogError, match="has no log"):
        fsck(tmp_path)

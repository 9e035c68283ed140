"""Tests that full segments are packed, and that unneeded old segments are deleted."""

import os

import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.resume import Resume, read_resume_state
from mmengine.errors import LogError
from mmengine.events import retention as module
from mmengine.events import vocabulary as ev
from mmengine.events.fsck import fsck
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.retention import Retention, Undelivered
from mmengine.events.snapshots import SnapshotFolder
from mmengine.replay import verify
from mmengine.request import SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.events.logs import read_events, write_log

FEW = Retention(max_bytes=1)


class Days:
    """A log writer with a record per commit, and three or four records per segment."""

    def __init__(self, folder, retention, **options):
        self.folder = folder
        self.writer = LogWriter(folder, retention=retention, segment_bytes=330, **options)

    def again(self, retention, *, knows=True):
        """Continue the log as another process. `knows`: whether the writer learns that all answers were
        delivered.
        """
        self.writer.close()
        self.writer = LogWriter(self.folder, reopen="tail", retention=retention, segment_bytes=330)
        if knows:
            self.writer.expect(Undelivered())

    def add(self, event):
        self.writer.append(event, 0, 0)
        assert self.writer.commit()

    def fill(self, count=8):
        for number in range(count):
            self.add(ev.Failed(f"number {number}"))

    def queue(self, name):
        self.add(ev.Queued(name, b"", SamplingParams()))

    def deliver(self, name):
        self.add(ev.Finished(name, "stop"))
        self.add(ev.Delivered(name))

    def snapshot(self, sequence):
        (self.folder / f"snapshot-{sequence:020d}.mmsnap").write_bytes(b"")

    def tidy(self):
        for _ in range(30):  # each call packs a segment
            self.writer._tidy_at = 0.0
            self.writer.tidy()

    @property
    def first(self):
        return LogReader(self.folder, "salvage").first_sequence

    @property
    def firsts(self):
        return sorted(int(path.name.split(".")[0]) for path in self.folder.glob("*.mmlog*"))


@pytest.fixture
def days(tmp_path):
    days = Days(tmp_path / "log", FEW)
    yield days
    days.writer.close()


def test_full_segments_are_packed_and_the_last_one_is_not(tmp_path):
    days = Days(tmp_path / "log", Retention())
    days.fill(20)
    assert not list(days.folder.glob("*.zst"))
    days.tidy()
    plain = list(days.folder.glob("*.mmlog"))
    packed = list(days.folder.glob("*.zst"))
    assert len(plain) == 1 and len(packed) == len(days.firsts) - 1 > 3
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in packed)
    assert [event.error for event in read_events(days.folder)] == [f"number {n}" for n in range(20)]
    days.fill(1)
    days.writer.close()
    assert len(read_events(days.folder)) == 21


def test_a_log_packs_to_less(tmp_path):
    log = write_log(tmp_path / "log", [ev.Executed(bytes(4000))] * 50)
    (path,) = log.glob("*.mmlog")
    size, time_ns = path.stat().st_size, path.stat().st_mtime_ns
    module.pack(path)
    (packed,) = log.glob("*.zst")
    assert packed.stat().st_size < size / 10 and packed.stat().st_mtime_ns == time_ns and not path.exists()


def test_a_log_that_has_not_begun_is_tidy(days):
    """Before the first record, `tidy` does nothing."""
    days.tidy()
    days.fill(1)
    assert days.first == 0


def test_a_reader_finds_segments_packed_meanwhile(days):
    days.fill(20)
    records = iter(LogReader(days.folder))
    first = next(records)
    days.tidy()
    assert [record.sequence for record in (first, *records)] == list(range(20))
    reader = LogReader(days.folder)
    days.folder.joinpath(f"{days.firsts[1]:020d}.mmlog.zst").unlink()
    with pytest.raises(LogError, match="was removed while the log was read"):
        list(reader)


def test_no_segment_is_deleted_without_a_snapshot(days):
    days.fill(20)
    days.tidy()
    assert days.first == 0


@pytest.mark.parametrize("sequence", range(12))
def test_a_segment_is_deleted_once_a_snapshot_follows_it(days, sequence):
    days.fill(20)
    firsts = days.firsts
    days.snapshot(sequence)
    days.tidy()
    assert days.first == max(first for first in firsts if first <= sequence + 1)
    records = [record.sequence for record in LogReader(days.folder)]
    assert records == list(range(days.first, 20))


def test_a_segment_stays_while_a_request_that_begins_in_it_was_not_delivered(days):
    days.fill(5)
    days.queue("a")
    place = days.writer.next_sequence - 1
    days.fill(20)
    days.snapshot(place - 1)
    days.snapshot(days.writer.next_sequence - 1)
    days.tidy()
    assert days.first == max(first for first in days.firsts if first <= place) == days.firsts[0] > 0
    days.add(ev.Finished("a", "stop"))
    days.tidy()
    assert days.first == days.firsts[0] <= place, "the request has ended, but its answer was not delivered"
    days.add(ev.Delivered("a"))
    days.fill(8)
    days.snapshot(days.writer.next_sequence - 1)
    days.tidy()
    assert days.first == days.firsts[0] > place and len(days.firsts) == 1


def test_the_oldest_request_counts_not_the_last(days):
    for name in ("a", "b", "c"):
        days.queue(name)
        days.fill(6)
    days.deliver("b")
    days.deliver("no such")
    for sequence in (3, 6, days.writer.next_sequence - 1):
        days.snapshot(sequence)
    days.tidy()
    assert days.first == 0
    days.deliver("a")
    days.tidy()
    assert 3 < days.first <= 7


def test_without_a_snapshot_before_the_oldest_request_no_segment_is_deleted(days):
    """Without this snapshot, the remaining segments could not restore the state at the request's arrival."""
    days.fill(9)
    days.queue("a")
    days.fill(9)
    days.snapshot(12)
    days.tidy()
    assert days.first == 0
    days.snapshot(8)
    days.tidy()
    assert 0 < days.first <= 9


def test_bytes(tmp_path):
    # Old segments are deleted until the log has at most 1,000 bytes.
    days = Days(tmp_path / "log", Retention(max_bytes=1000), pack_full=False)
    days.fill(40)
    days.snapshot(39)
    days.tidy()
    size = sum(path.stat().st_size for path in days.folder.glob("*.mmlog"))
    assert 600 < size <= 1000 and days.first > 20
    days.writer.close()


def test_age(tmp_path):
    # Only the two segments that are older than an hour are deleted.
    days = Days(tmp_path / "log", Retention(max_age_s=3600))
    days.fill(20)
    days.snapshot(19)
    days.tidy()
    assert days.first == 0
    paths = sorted(days.folder.glob("*.zst"))
    for path in paths[:2]:
        os.utime(path, (0, 0))
    days.again(Retention(max_age_s=3600))
    days.tidy()
    assert days.first == days.firsts[0] and len(list(days.folder.glob("*.zst"))) == len(paths) - 2
    days.writer.close()


def test_snapshots_without_later_records_are_deleted(days):
    days.fill(20)
    for sequence in (1, 7, 15, 18):
        days.snapshot(sequence)
    days.tidy()
    left = sorted(int(path.stem.split("-")[1]) for path in days.folder.glob("*.mmsnap"))
    assert left == [sequence for sequence in (1, 7, 15, 18) if sequence >= days.first - 1]
    assert len(left) < 4 and list(LogReader(days.folder))


def test_undelivered_answers_are_known_after_a_restart(days):
    days.queue("a")
    days.fill(20)
    days.again(FEW, knows=False)
    days.fill(8)
    days.snapshot(days.writer.next_sequence - 1)
    days.tidy()
    assert days.first == 0, "the undelivered requests are not known yet"
    days.writer.expect(Undelivered({"a": 0}))
    days.tidy()
    assert days.first == 0
    days.deliver("a")
    days.tidy()
    assert days.first > 0


def test_segments_that_were_not_packed_are_packed_after_a_restart(tmp_path):
    folder = write_log(tmp_path / "log", [ev.Failed(f"number {n}") for n in range(20)], segment_bytes=330)
    writer = LogWriter(folder, reopen="tail")
    writer.close()
    assert len(list(folder.glob("*.mmlog"))) == 1, (
        "the last segment is not packed, because its footer may still change"
    )
    assert len(list(folder.glob("*.zst"))) > 5 and len(read_events(folder)) == 20


def test_a_deleted_segment_does_not_stop_packing(tmp_path):
    days = Days(tmp_path / "log", Retention())
    days.fill(20)
    days.writer._tidy_at = 0.0
    days.writer.tidy()
    first, *rest, last = sorted(days.folder.glob("*.mmlog"))
    assert len(rest) > 1
    first.unlink()
    days.tidy()
    assert list(days.folder.glob("*.mmlog")) == [last]
    assert len(list(days.folder.glob("*.zst"))) == 1 + len(rest)
    days.writer.close()


def test_a_disk_without_space_to_pack_keeps_its_segments(days, monkeypatch):
    days.fill(12)
    monkeypatch.setattr(module.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "planted")))
    days.tidy()
    assert not list(days.folder.glob("*.part")) and not list(days.folder.glob("*.zst"))
    calls = []
    monkeypatch.setattr(module.os, "fsync", lambda fd: calls.append(fd))
    days.writer.tidy()
    assert not calls, "the next call does not try again at once"
    days.tidy()
    assert calls and list(days.folder.glob("*.zst"))
    assert len(read_events(days.folder)) == 12


def test_tidying_and_appending_at_once(tmp_path):
    """Another thread may call `tidy` while records are appended."""
    import threading

    days, done = Days(tmp_path / "log", Retention(max_bytes=3000)), threading.Event()
    errors = []

    def tidy():
        while not done.is_set():
            try:
                days.tidy()
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=tidy)
    thread.start()
    for number in range(150):
        days.queue(f"r{number}")
        days.deliver(f"r{number}")
        if number % 10 == 9:
            days.snapshot(days.writer.next_sequence - 1)
    done.set()
    thread.join()
    days.writer.close()
    assert not errors
    records = [record.sequence for record in LogReader(days.folder)]
    assert records == list(range(records[0], 450)) and records[0] > 150


def test_a_packed_segment_that_claims_too_much(tmp_path):
    folder = write_log(tmp_path / "log", [ev.CacheReset()])
    (path,) = folder.glob("*.mmlog")
    module.pack(path)
    (packed,) = folder.glob("*.zst")
    import zstandard

    for data, what in (
        (zstandard.ZstdCompressor().compress(bytes(2**28)), "claims to hold"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 99), "does not state"),
        (packed.read_bytes() + b"more", "damaged"),
        (packed.read_bytes()[:-5], "damaged"),
        (b"", "damaged"),
    ):
        packed.write_bytes(data)
        with pytest.raises(LogError, match=what):
            list(LogReader(folder))


def test_a_long_run_in_little_room_can_always_be_resumed(tmp_path):
    """A log from which segments are deleted can be resumed, even if an old answer is not delivered."""
    folder, config = tmp_path / "log", settings_of()
    writer = LogWriter(folder, segment_bytes=2500, retention=Retention(max_bytes=5000))
    snapshots = SnapshotFolder(folder, 1500)
    core = EngineCore(config, SimulatedExecutor(config), sink=writer, snapshots=snapshots)
    tokens, ended, firsts, number = {}, set(), [], 0
    while number < 90 or core.has_work:
        if number < 90 and len(tokens) - len(ended) < 3:
            core.submit(request(f"r{number}", 5 + number % 9, max_tokens=4 + number % 13))
            tokens[f"r{number}"] = []
            number += 1
        for output in core.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                ended.add(output.request_id)
                if output.request_id != "r40":
                    core.delivered(output.request_id)
        if number == 80 and "r40" in ended:
            core.delivered("r40")
            ended.discard("r40")
        writer._tidy_at = 0.0
        writer.tidy()
        if not firsts or LogReader(folder).first_sequence != firsts[-1]:
            firsts.append(LogReader(folder).first_sequence)
            answers = read_resume_state(folder, Resume()).answers
            assert all(answers[name].token_ids == tokens[name] for name in answers)
            assert {name for name in tokens if name not in ended} - {f"r{number - 1}"} <= set(answers) | {
                "r40"
            }
            assert "r40" not in ended or "r40" in answers
    assert len(firsts) > 5 and firsts[-1] > firsts[len(firsts) // 2]
    core.close()
    kept = sum(path.stat().st_size for path in folder.iterdir() if "snapshot" not in path.name)
    assert kept < 4 * 2500 + 5000
    assert not read_resume_state(folder, Resume()).answers
    report = verify(folder)
    assert report.ok and report.begins_after > 0 and not report.unfinished
    assert fsck(folder).exit_code == 0 and LogReader(folder).first_sequence > 100

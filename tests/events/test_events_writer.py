"""Tests that the writer makes a single write per commit, and that the log has only complete records even if
system calls fail.
"""

import errno
import os
import stat
import subprocess
import sys

import pytest

from mmengine.core.engine import EngineCore
from mmengine.errors import LogError, MMEngineError
from mmengine.events import recovery as recovery_module
from mmengine.events import vocabulary as ev
from mmengine.events import writer as writer_module
from mmengine.events.fsck import fsck
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.recovery import walk_segment
from mmengine.events.segment import FOOTER_SIZE, Follows, part_of
from mmengine.replay import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import request, settings_of
from tests.events.logs import one_of_each, read_events, segments, write_log


class Disk:
    """Replaces a writer's system calls. `room`: number of bytes that can still be written; None for no limit.
    `fail_at`: the number of the call that fails. A failing write stores half of its bytes and returns a short
    count. All other failing calls raise OSError.
    """

    def __init__(self, monkeypatch, room=None, fail_at=None):
        self.room, self.fail_at, self.calls = room, fail_at, 0
        self.failed = None
        for name in ("write", "fdatasync", "fsync", "ftruncate", "replace", "open"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, real):
        def call(first, *rest, **options):
            if name == "open" and not str(first).endswith((".part", ".mmlog")):
                return real(first, *rest, **options)
            self.calls += 1
            if self.calls == self.fail_at:
                self.failed = name
                if name == "write":
                    return real(first, rest[0][: len(rest[0]) // 2])
                raise OSError(errno.EIO, "planted")
            if name == "write" and self.room is not None:
                return self._write(real, first, *rest)
            return real(first, *rest, **options)

        return call

    def _write(self, real, fd, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[: self.room])
        self.room -= written
        return written


def test_one_write_per_commit(tmp_path, monkeypatch):
    writer, disk = LogWriter(tmp_path / "log"), Disk(monkeypatch)
    for event in one_of_each():
        writer.append(event, 0, 0)
    assert disk.calls == 0 and not segments(tmp_path / "log")
    assert writer.commit() and writer.commit()
    assert disk.calls == 7, "the calls for a new segment's header and name, then one write of the records"
    assert read_events(tmp_path / "log") == one_of_each()
    assert writer.num_bytes == segments(tmp_path / "log")[0].stat().st_size
    writer.close()


def test_only_the_owner_may_read(tmp_path):
    folder = write_log(tmp_path / "log", one_of_each())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(segments(folder)[0].stat().st_mode) == 0o600


def test_rotation(tmp_path):
    folder = write_log(tmp_path / "log", one_of_each() * 5, segment_bytes=800)
    paths = segments(folder)
    firsts = [int(path.stem) for path in paths]
    assert firsts[0] == 0 and firsts == sorted(firsts) and len(firsts) > 5
    assert all(path.stat().st_size <= 800 for path in paths)
    assert read_events(folder) == one_of_each() * 5


def test_a_commit_larger_than_a_segment_stays_whole(tmp_path):
    writer = LogWriter(tmp_path / "log", segment_bytes=100, pack_full=False)
    for _ in range(3):
        for event in one_of_each():
            writer.append(event, 0, 0)
        assert writer.commit()
    writer.close()
    assert len(segments(tmp_path / "log")) == 3
    assert read_events(tmp_path / "log") == one_of_each() * 3


def test_two_writers(tmp_path):
    first = LogWriter(tmp_path / "log")
    with pytest.raises(LogError, match="another process is writing the log"):
        LogWriter(tmp_path / "log")
    first.append(ev.CacheReset(), 0, 0)
    first.close()
    first.close()
    with pytest.raises(LogError, match="has a log already"):
        LogWriter(tmp_path / "log")
    assert len(read_events(tmp_path / "log")) == 1


@pytest.mark.parametrize("made", ["file", "below a file", "lock is a link"])
def test_a_folder_that_cannot_be_had(tmp_path, made):
    folder = tmp_path / "log"
    if made == "lock is a link":
        folder.mkdir()
        (folder / "lock").symlink_to(tmp_path / "elsewhere")
    else:
        folder.write_text("a file")
    with pytest.raises(LogError, match="no log can be written in"):
        LogWriter(folder / "deeper" if made == "below a file" else folder)
    assert not (tmp_path / "elsewhere").exists()


def test_a_refused_writer_lets_the_folder_go(tmp_path):
    write_log(tmp_path / "log", one_of_each())
    with pytest.raises(LogError, match="has a log already"):
        LogWriter(tmp_path / "log")
    segments(tmp_path / "log")[0].unlink()
    LogWriter(tmp_path / "log").close()


def test_a_full_disk_keeps_whole_records_and_the_rest_for_later(tmp_path, monkeypatch):
    folder = tmp_path / "log"
    writer = LogWriter(folder)
    writer.append(ev.Failed("before"), 0, 0)
    assert writer.commit()
    size = segments(folder)[0].stat().st_size
    disk = Disk(monkeypatch, room=30)
    writer.append(ev.Failed("during"), 1, 0)
    assert not writer.commit(), "the write was short"
    assert segments(folder)[0].stat().st_size == size
    disk.room = 0
    writer.append(ev.Failed("later"), 2, 0)
    assert not writer.commit(), "the write raised"
    assert segments(folder)[0].stat().st_size == size and "No space left" in writer.stalled
    disk.room = 10_000
    assert writer.commit() and not writer.stalled
    assert [event.error for event in read_events(folder)] == ["before", "during", "later"]
    assert writer.num_bytes == segments(folder)[0].stat().st_size
    writer.close()


def test_torn_bytes_that_cannot_be_cut_at_once_are_cut_before_the_next_write(tmp_path, monkeypatch):
    writer = LogWriter(tmp_path / "log")
    writer.append(ev.Failed("one"), 0, 0)
    assert writer.commit()
    disk = Disk(monkeypatch, room=30)
    real, broken = os.ftruncate, [True]

    def ftruncate(fd, size):
        if broken:
            raise OSError(errno.EIO, "planted")
        real(fd, size)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    writer.append(ev.Failed("two"), 0, 0)
    assert not writer.commit()
    disk.room = 10_000
    assert not writer.commit(), "the torn bytes are still there"
    broken.clear()
    assert writer.commit()
    writer.close()
    assert [event.error for event in read_events(tmp_path / "log")] == ["one", "two"]


@pytest.mark.parametrize("sync_always", [False, True])
def test_any_system_call_may_fail_once(tmp_path, monkeypatch, sync_always):
    """After a failure in any system call, each record is in the log once, in order."""
    events, kinds = one_of_each()[3:12], set()
    for fail_at in range(1, 100):
        folder = tmp_path / str(fail_at)
        with monkeypatch.context() as patch:
            disk = Disk(patch, fail_at=fail_at)
            writer, refused = LogWriter(folder, sync_always=sync_always, segment_bytes=340), 0
            for event in events:
                writer.append(event, 0, 0)
                refused += not writer.commit()
            try:
                writer.close()
            except LogError as error:
                assert "synced" in str(error) and disk.failed == "fdatasync"
            assert refused <= 1
        kinds.add(disk.failed)
        reader = LogReader(folder)
        assert [record.event for record in reader] == events
        assert reader.torn is None
        if disk.failed is None:
            break
    assert kinds == {"write", "fdatasync", "fsync", "replace", "open", None}


def test_closing_a_stalled_log_reports_lost_records(tmp_path, monkeypatch):
    writer = LogWriter(tmp_path / "log")
    writer.append(ev.Failed("kept"), 0, 0)
    assert writer.commit()
    Disk(monkeypatch, room=5)
    writer.append(ev.Failed("lost"), 0, 0)
    writer.append(ev.Failed("lost"), 0, 0)
    with pytest.raises(LogError, match="No space left.*its last 2 records are lost"):
        writer.close()
    assert [event.error for event in read_events(tmp_path / "log")] == ["kept"]
    segments(tmp_path / "log")[0].unlink()
    LogWriter(tmp_path / "log").close()  # works because the lock was released


def test_sync_beside_rotation(tmp_path, monkeypatch):
    """`sync` in another thread ignores a descriptor that the writer has closed."""
    writer = LogWriter(tmp_path / "log")
    writer.sync()
    writer.append(ev.Failed("x"), 0, 0)
    assert writer.commit()
    writer.sync()
    os.close(writer._fd)
    writer.sync()
    monkeypatch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "planted")))
    with pytest.raises(OSError, match="planted"):
        writer.sync()


def run(core, tokens, ends, steps=10_000):
    while core.has_work and steps:
        steps -= 1
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason


@pytest.mark.parametrize("room", [0, 1, 40, 200, 1000, 1777])
def test_an_engine_on_a_full_disk(tmp_path, monkeypatch, room):
    """No output appears before its record is in the log. The run continues when space is free again."""
    config = settings_of(checkpoint_interval=2)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    tokens, ends = {}, {}
    requests = [request(f"r{number}", 5 + number, max_tokens=8) for number in range(6)]
    for one in requests[:5]:
        core.submit(one)
    disk = Disk(monkeypatch, room=room)
    run(core, tokens, ends, steps=40)
    assert core.stalled and core.has_work and len(ends) < 5
    with pytest.raises(MMEngineError, match="no new requests: .*No space left"):
        core.submit(requests[5])
    logged = 0
    if segments(tmp_path / "log"):
        reader = LogReader(tmp_path / "log")
        executed = [record.event for record in reader if isinstance(record.event, ev.Executed)]
        logged = sum(len(event.token_ids) // 4 for event in executed)
        assert reader.torn is None
    assert sum(map(len, tokens.values())) == logged, "all tokens in outputs are in the log"
    assert core.step() is not None and not list(core.step())
    disk.room = None
    run(core, tokens, ends)
    core.submit(requests[5])
    run(core, tokens, ends)
    core.close()
    for one in requests:
        assert (tokens[one.request_id], ends[one.request_id]) == reference_tokens(one, config)
    report = verify(tmp_path / "log")
    assert report.ok and report.torn is None and report.requests == 6 and not report.unfinished


def test_an_engine_that_closes_on_a_full_disk_frees_the_device(tmp_path, monkeypatch):
    """The engine closes its executor although the log's last records cannot be written."""
    config = settings_of()
    executor = SimulatedExecutor(config)
    closed = []
    monkeypatch.setattr(executor, "close", lambda: closed.append(True))
    core = EngineCore(config, executor, sink=LogWriter(tmp_path / "log"))
    Disk(monkeypatch, room=3)
    with pytest.raises(LogError, match="its last 2 records are lost"):
        core.close()
    assert closed


LIMITED = """
import resource, sys
from pathlib import Path
from mmengine.core.engine import EngineCore
from mmengine.simulation.simulated_executor import SimulatedExecutor
from mmengine.events.log import LogWriter
from mmengine.replay import verify
from tests.core.small_engine import request, settings_of

folder = Path(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4200, hard))
config = settings_of()
core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(folder))
for number in range(5):
    core.submit(request(f"r{number}", 9, max_tokens=20))
tokens = 0
for _ in range(100):
    tokens += sum(len(output.token_ids) for output in core.step())
assert core.stalled and 0 < tokens < 100, tokens
size = sum(path.stat().st_size for path in folder.glob("*.mmlog"))
held, before = verify(folder), tokens
assert size <= 4200 and held.ok and held.torn is None and held.tokens == tokens
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
while core.has_work:
    tokens += sum(len(output.token_ids) for output in core.step())
core.close()
report = verify(folder)
assert report.ok and report.torn is None and report.tokens == tokens == 100 and not report.unfinished
print("recovered", before)
"""


def test_a_real_limit_of_the_system(tmp_path):
    """At the limit on file sizes, the kernel first returns a short count and then an error."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "log")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("recovered")


def test_a_segment_has_so_many_frames_at_most(tmp_path, monkeypatch):
    """The number of frames is limited, because recovery reads the last segment frame by frame."""
    monkeypatch.setattr(writer_module, "SEGMENT_FRAMES", 10)
    folder = write_log(tmp_path / "log", [ev.Failed(f"number {n}") for n in range(35)])
    assert [int(path.stem) for path in segments(folder)] == [0, 10, 20, 30]
    assert [event.error for event in read_events(folder)] == [f"number {n}" for n in range(35)]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_continuing_writer_reads_the_last_segment_once(tmp_path, monkeypatch, is_killed):
    folder, opened = tmp_path / "log", []
    write_log(folder, [ev.Failed(f"number {n}") for n in range(35)], segment_bytes=600)
    *_, last = segments(folder)
    if is_killed:
        last.write_bytes(last.read_bytes()[:-FOOTER_SIZE] + b"mmfr")
    read = recovery_module.open_segment
    monkeypatch.setattr(recovery_module, "open_segment", lambda path: opened.append(path) or read(path))
    writer = LogWriter(folder, reopen="tail")
    writer.append(ev.Failed("more"), 0, 10**9)
    assert writer.commit()
    writer.close()
    assert opened == [last]
    assert len(read_events(folder)) == 36 and fsck(folder).exit_code == 0


def test_a_footer_promises_a_segment_again_after_a_repair(tmp_path):
    """The writer was killed after a footer announced the next segment, but before the segment's file was
    renamed.
    """
    folder = write_log(tmp_path / "log", [ev.Failed(f"number {n}") for n in range(35)], segment_bytes=600)
    *_, before, last = segments(folder)
    last.rename(part_of(folder, int(last.stem)))
    assert walk_segment(before).scan.follows is Follows.SEGMENT
    writer = LogWriter(folder, reopen="tail")
    assert walk_segment(before).scan.follows is Follows.REPAIRED
    writer.append(ev.Failed("more"), 0, 10**9)
    assert writer.commit()
    writer.close()
    assert walk_segment(before).scan.follows is Follows.SEGMENT
    assert fsck(folder).exit_code == 0
    segments(folder)[-1].unlink()
    with pytest.raises(LogError, match="says that another segment follows"):
        LogWriter(folder, reopen="tail")

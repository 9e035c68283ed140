"""Tests a disk that becomes full during a run: running requests finish, new requests are refused, no
acknowledged record is lost, and the log continues when space is free again.
"""

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.snapshot_writer import SnapshotWriter
from mmengine.errors import LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.reserve import MIN_BYTES, RESERVE_BYTES
from mmengine.events.snapshots import SnapshotFolder
from mmengine.replay import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import request, settings_of


class SmallDisk:
    """Simulates a file system with `num_bytes` bytes by replacing a log writer's system calls. Written
    bytes and the allocated reserve reduce `free`.
    """

    def __init__(self, monkeypatch, num_bytes):
        self.free, self.reserve = num_bytes, 0
        write, unlink = os.write, os.unlink

        def small_write(fd, data):
            if not self.free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(fd, data[: self.free])
            self.free -= written
            return written

        def allocate(fd, offset, length):
            if length - self.reserve > self.free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.free -= length - self.reserve
            self.reserve = length

        def small_unlink(path, **options):
            unlink(path, **options)
            if str(path).endswith("reserve"):
                self.free += self.reserve
                self.reserve = 0

        for name, call in (
            ("write", small_write),
            ("posix_fallocate", allocate),
            ("statvfs", lambda path: SimpleNamespace(f_bavail=self.free, f_frsize=1)),
            ("unlink", small_unlink),
        ):
            monkeypatch.setattr(os, name, call)


class Users:
    """Submits requests to an engine that writes its log to `folder`, and collects the outputs."""

    def __init__(self, folder, **options):
        self.config = settings_of(max_waiting=64, max_model_len=512, num_blocks=600)
        executor = SimulatedExecutor(self.config)
        self.core = EngineCore(self.config, executor, sink=LogWriter(folder, wall_ns=lambda: 0, **options))
        self.requests, self.tokens, self.ends = {}, {}, {}

    def submit(self):
        name = f"r{len(self.requests)}"
        one = request(name, 5 + len(self.requests) % 20, max_tokens=300)
        self.core.submit(one)
        self.requests[name] = one

    def step(self):
        for output in self.core.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                self.ends[output.request_id] = output.finish_reason

    def run_until_refused(self, most=4000):
        """Keep a few requests running until the engine refuses a request, and return the error's text."""
        for _ in range(most):
            if len(self.requests) - len(self.ends) < 4 or self.core.stalled:
                try:
                    self.submit()
                except MMEngineError as error:
                    return str(error)
            self.step()
        raise AssertionError("the disk did not fill up")

    def finish(self, most=4000):
        while self.core.has_work and most:
            most -= 1
            self.step()

    def check_all(self):
        for name, one in self.requests.items():
            assert (self.tokens[name], self.ends[name]) == reference_tokens(one, self.config)

    def logged_tokens(self, folder):
        executed = (record.event for record in LogReader(folder))
        return sum(len(event.token_ids) // 4 for event in executed if isinstance(event, ev.Executed))


@pytest.mark.long
def test_running_requests_end_on_the_reserve(tmp_path, monkeypatch):
    disk = SmallDisk(monkeypatch, 500_000)
    users = Users(tmp_path / "log", reserve_bytes=100_000)
    assert disk.reserve == 100_000
    refusal = users.run_until_refused()
    assert "no new requests: the disk of the log" in refusal and "on reserved disk space" in refusal
    assert disk.reserve == 0 and users.core.has_work
    users.finish()
    users.check_all()
    assert users.core.stalled and disk.free > 0, "some space is left, but not enough for new requests"
    with pytest.raises(MMEngineError, match="no new requests"):
        users.submit()
    disk.free += 300_000
    users.submit()
    assert disk.reserve == 100_000 and not users.core.stalled
    users.finish()
    users.check_all()
    users.core.close()
    report = verify(tmp_path / "log")
    assert report.ok and report.torn is None and not report.unfinished
    assert report.requests == len(users.requests)
    assert disk.reserve == 0 and not (tmp_path / "log" / "reserve").exists()


def test_on_the_reserve_no_other_file_takes_space(tmp_path, monkeypatch):
    """While the log uses its reserve, no segment is packed and no snapshot is written."""
    disk, folder = SmallDisk(monkeypatch, 300_000), tmp_path / "log"
    users = Users(folder, reserve_bytes=60_000, segment_bytes=20_000)
    core = users.core
    core._snapshots = SnapshotWriter(
        SnapshotFolder(folder, 20_000), core.state, core._started, core.sink, None
    )
    users.run_until_refused()
    before = set(folder.glob("snapshot-*"))
    assert before
    users.core.sink._tidy_at = 0.0
    users.core.sink.tidy()
    users.finish()
    assert users.core.stalled and set(folder.glob("snapshot-*")) == before and not list(folder.glob("*.zst"))
    disk.free += 10**6
    users.submit()
    users.core.sink._tidy_at = 0.0
    users.core.sink.tidy()
    users.finish()
    assert set(folder.glob("snapshot-*")) > before and list(folder.glob("*.zst"))
    users.core.close()


def test_without_the_reserve_no_output_precedes_its_record(tmp_path, monkeypatch):
    disk = SmallDisk(monkeypatch, 80_000)
    users = Users(tmp_path / "log", reserve_bytes=2000)
    users.run_until_refused()
    users.finish(most=200)
    assert users.core.has_work and "cannot be written" in users.core.stalled
    assert sum(map(len, users.tokens.values())) == users.logged_tokens(tmp_path / "log")
    held = verify(tmp_path / "log")
    assert held.ok and held.torn is None
    disk.free += 200_000
    users.finish()
    users.check_all()
    assert not users.core.stalled and disk.reserve == 2000
    users.core.close()
    assert verify(tmp_path / "log").requests == len(users.requests)


def test_a_small_disk_gets_a_small_reserve(tmp_path, monkeypatch):
    disk = SmallDisk(monkeypatch, 1_200_000)
    writer = LogWriter(tmp_path / "log")
    assert disk.reserve == RESERVE_BYTES // 16 and not writer.stalled
    writer.close()


def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch):
    disk = SmallDisk(monkeypatch, 2 * MIN_BYTES - 1)
    users = Users(tmp_path / "log")
    with pytest.raises(MMEngineError, match="no new requests: the disk of the log .* is full"):
        users.submit()
    disk.free += 4 * MIN_BYTES
    users.submit()
    users.finish()
    users.core.close()
    users.check_all()


def test_a_disk_that_cannot_hold_room_back_is_used_without(tmp_path, monkeypatch):
    """On a file system without posix_fallocate, a log works without a reserve."""

    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    users = Users(tmp_path / "log")
    users.submit()
    users.finish()
    users.core.close()
    users.check_all()


def test_an_engine_that_closes_on_its_reserve_loses_nothing(tmp_path, monkeypatch):
    SmallDisk(monkeypatch, 250_000)
    users = Users(tmp_path / "log", reserve_bytes=60_000)
    users.run_until_refused()
    users.core.close()
    report = verify(tmp_path / "log")
    assert report.ok and report.torn is None and report.unfinished
    assert report.tokens == sum(map(len, users.tokens.values()))


@pytest.fixture
def tmpfs():
    """Mount a real file system with 1 MB, and return its folder."""
    folder = Path(tempfile.mkdtemp())
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or not mount or subprocess.run(command, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("a file system can only be mounted by root, where that is permitted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.long
def test_a_tmpfs_of_one_megabyte(tmpfs):
    """The log and another file fill the disk. The other file is deleted later."""
    other = tmpfs / "other"
    users = Users(tmpfs / "log")
    other.write_bytes(bytes(450_000))
    assert (tmpfs / "log" / "reserve").stat().st_size == RESERVE_BYTES // 16 == 2**18
    assert "is full" in users.run_until_refused(most=20_000)
    users.finish()
    users.check_all()
    held = verify(tmpfs / "log")
    assert held.ok and held.torn is None and not held.unfinished
    assert held.tokens == sum(map(len, users.tokens.values()))
    other.unlink()
    for _ in range(3):
        users.submit()
    users.finish()
    users.check_all()
    users.core.close()
    report = verify(tmpfs / "log")
    assert report.ok and report.torn is None and report.requests == len(users.requests)
    assert not report.unfinished


def test_another_process_fills_a_tmpfs(tmpfs):
    """Another process uses all free space, and also the reserve's space as soon as the log releases it."""
    users = Users(tmpfs / "log")
    for _ in range(4):
        users.submit()
    for _ in range(20):
        users.step()
    other = open(tmpfs / "other", "wb", buffering=0)  # noqa: SIM115
    taken = 0
    while users.core.has_work and taken < 10**6:
        users.step()
        for _ in range(50):
            try:
                taken += other.write(bytes(8192))
            except OSError:
                break
    users.finish(most=50)
    assert users.core.has_work and "cannot be written" in users.core.stalled
    assert sum(map(len, users.tokens.values())) == users.logged_tokens(tmpfs / "log")
    other.close()
    (tmpfs / "other").unlink()
    users.finish()
    users.check_all()
    users.core.close()
    assert verify(tmpfs / "log").ok


def test_a_log_that_cannot_be_begun_says_so(tmp_path):
    (tmp_path / "log").write_text("a file")
    with pytest.raises(LogError, match="no log can be written in"):
        LogWriter(tmp_path / "log")

"""Tests a writer that is killed between any two system calls: all acknowledged records are in the log, and
another writer can continue the log.
"""

import os
from contextlib import suppress

import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.log_end import log_end
from mmengine.events.retention import Retention

CALLS = ("open", "write", "fdatasync", "fsync", "ftruncate", "replace", "unlink", "posix_fallocate")


class Killed(BaseException):
    """Simulates a kill. No handler in the log's code catches this exception."""


class Kill:
    """Counts system calls, and raises Killed at call number `at`. A killed write stores half of its bytes."""

    def __init__(self, monkeypatch, at):
        self.calls, self.at, self.name = 0, at, ""
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name, real):
        def call(*arguments, **options):
            self.calls += 1
            if self.calls == self.at:
                self.name = name
                if name in ("write", "pwrite"):
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                raise Killed
            if self.at and self.calls > self.at:
                raise Killed  # a killed process makes no more calls
            return real(*arguments, **options)

        return call


def live(folder, numbers, acknowledged, *, snapshots=False):
    """Simulate a process that commits one record for each number, and packs full segments.

    With `snapshots`, a snapshot follows each record, and old segments are deleted.
    """
    retention = Retention(max_bytes=700) if snapshots else Retention()
    writer = LogWriter(folder, reopen="tail", segment_bytes=260, retention=retention, reserve_bytes=65536)
    try:
        for number in numbers:
            writer.append(ev.Failed(f"number {number}"), 0, 0)
            if writer.commit():
                acknowledged.append(number)
            if snapshots:
                (folder / f"snapshot-{writer.next_sequence - 1:020d}.mmsnap").touch()
            writer._tidy_at = 0.0
            writer.tidy()
        writer.close()
    finally:
        for name in ("_fd", "_lock"):  # the system closes a dead process's files
            with suppress(OSError):
                os.close(getattr(writer, name))


def in_log(folder, mode="tail"):
    if not any(folder.glob("*.mmlog*")):
        return []
    return [int(record.event.error.split()[1]) for record in LogReader(folder, mode)]


def killed_life(monkeypatch, at, folder, numbers, acknowledged, **options):
    """Return the system call at which the process died, or "" if it lived."""
    with monkeypatch.context() as patch:
        kill = Kill(patch, at)
        with suppress(Killed):
            live(folder, numbers, acknowledged, **options)
            return ""
    return kill.name


@pytest.mark.long
@pytest.mark.parametrize("snapshots", [False, True])
def test_killed_at_any_system_call(tmp_path, monkeypatch, snapshots):
    places = set()
    for at in range(1, 400):
        folder, acknowledged = tmp_path / str(at), []
        name = killed_life(monkeypatch, at, folder, range(9), acknowledged, snapshots=snapshots)
        places.add(name)
        found = in_log(folder)
        if found:
            assert log_end(folder).kind in ("", "unclosed", "truncated"), "no acknowledged record is lost"
        kept = found[0] if found else 0
        assert kept == 0 or snapshots
        expected = list(range(kept, len(acknowledged)))
        assert found in (expected, [*expected, len(acknowledged)]), (
            "at most the record that was being written is also in the log"
        )
        again = []
        live(folder, range(100, 103), again, snapshots=snapshots)
        assert again == [100, 101, 102]
        rest = in_log(folder, "strict")
        assert rest[-3:] == again and rest[:-3] == found[len(found) - len(rest) + 3 :]
        if not name:
            break
    assert places >= {"", "open", "write", "fdatasync", "fsync", "replace", "unlink"}


@pytest.mark.long
def test_killed_again_while_it_recovers(tmp_path, monkeypatch):
    """The process that repairs a torn tail is itself killed, at each of its system calls."""
    torn = next(
        at
        for at in range(1, 400)
        if killed_life(monkeypatch, at, tmp_path / f"find-{at}", range(7), []) == "write" and at > 40
    )
    for at in range(1, 100):
        folder, acknowledged = tmp_path / str(at), []
        assert killed_life(monkeypatch, torn, folder, range(7), acknowledged) == "write"
        name = killed_life(monkeypatch, at, folder, range(50, 52), acknowledged)
        assert in_log(folder)[: len(acknowledged)] == acknowledged
        assert log_end(folder).kind in ("", "unclosed", "truncated")
        live(folder, [100], acknowledged)
        assert in_log(folder, "strict")[-1] == 100
        if not name:
            break
    assert 10 < at < 99

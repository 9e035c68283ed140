"""Tests the debugger's cached states. A long log is opened with its cached states. A different log in the
same folder is opened without cached states.
"""

import errno
import os
import random
import stat

import msgspec
import pytest

from mmengine.core.state.digest import state_digest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.debug import navigator, open_debugger
from mmengine.replay.debug.saved import kept_states
from mmengine.replay.findings import Findings
from mmengine.replay.timeline import fold
from tests.events.logs import rewrite
from tests.replay.broken_builds import write_broken
from tests.replay.runs import busy_run


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(navigator, "MIN_RECORDS", 50)
    return tmp_path / "cache" / "mmengine" / "debug"


@pytest.fixture
def log(tmp_path):
    busy_run(tmp_path / "log", num_requests=24)
    return tmp_path / "log"


def opened(folder, findings=None):
    debugger = open_debugger(folder, findings)
    debugger.navigator.marks.every_records = min(24, debugger.navigator.marks.every_records)
    return debugger


def kept(folder, cache):
    debugger = opened(folder)
    debugger.goto_end()
    debugger.navigator.keep()
    (path,) = cache.iterdir()
    return debugger, path


def test_a_log_opens_with_the_kept_states(cache, log):
    first, path = kept(log, cache)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(cache.stat().st_mode) == 0o700
    again = opened(log)
    assert [mark.position for mark in again.navigator.marks.all] == [
        mark.position for mark in first.navigator.marks.all
    ]
    expected = {record.sequence: (state_digest(state), record) for state, record in fold(CheckedLog(log))}
    for position in random.Random(3).choices(list(expected), k=12):
        again.navigator.go(position)
        assert (state_digest(again.navigator.state), again.navigator.record) == expected[position]
    for name in list(first.navigator.arrivals)[::7]:
        again.goto_request(name)
        assert again.navigator.record.event.request_id == name
    assert again.navigator.arrivals == first.navigator.arrivals
    before = path.stat().st_mtime_ns
    again.navigator.keep()
    assert path.stat().st_mtime_ns == before, "there are no new states"


def test_a_log_that_grew_keeps_its_states(cache, log, tmp_path):
    records = list(LogReader(log))
    part = rewrite(records[: len(records) // 2], tmp_path / "part")
    _, path = kept(part, cache)
    writer = LogWriter(tmp_path / "whole")
    for record in records:
        writer.append(record.event, record.step, record.mono_ns)
    writer.close()
    for file in part.iterdir():
        file.unlink()
    for file in (tmp_path / "whole").iterdir():
        file.rename(part / file.name)
    again = opened(part)
    assert len(again.navigator.marks.all) > 1
    again.goto_end()
    assert again.navigator.end == len(records)
    again.navigator.keep()
    assert len(opened(part).navigator.marks.all) > len(records) // 2 // 24 and len(list(cache.iterdir())) == 1


def test_other_logs_and_damaged_files_are_not_used(cache, log, tmp_path):
    _, path = kept(log, cache)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-9], whole[:500] + b"\0" + whole[501:], bytes(64), b"\xc1" * 90):
        path.write_bytes(damaged)
        assert len(opened(log).navigator.marks.all) == 1
    path.write_bytes(whole)
    assert len(opened(log).navigator.marks.all) > 1
    changed = (
        msgspec.structs.replace(each, mono_ns=each.mono_ns + 1) if each.sequence else each
        for each in LogReader(log)
    )
    other = rewrite(changed, tmp_path / "other")
    for file in log.iterdir():
        file.unlink()
    for file in other.iterdir():
        file.rename(log / file.name)
    assert len(opened(log).navigator.marks.all) == 1, "the folder has another log now"


def test_a_new_log_in_the_folder_is_opened(cache, log, tmp_path):
    """The new log's records have other sizes, so no record begins at the last cached state's offset."""
    kept(log, cache)
    longer = (
        msgspec.structs.replace(each, event=msgspec.structs.replace(each.event, request_id="x" * 999))
        if isinstance(each.event, ev.Queued)
        else each
        for each in LogReader(log)
    )
    other = rewrite(longer, tmp_path / "other")
    for file in log.iterdir():
        file.unlink()
    for file in other.iterdir():
        file.rename(log / file.name)
    assert len(opened(log).navigator.marks.all) == 1


def test_incomplete_files_do_not_stay(cache, log, monkeypatch):
    cache.mkdir(parents=True)
    (cache / "killed.123").write_bytes(bytes(9))
    os.utime(cache / "killed.123", (1, 1))
    monkeypatch.setattr(kept_states, "MAX_CACHED_BYTES", 8)
    debugger = opened(log)
    debugger.goto_end()
    with monkeypatch.context() as full:
        full.setattr(kept_states.Path, "replace", no_room)
        debugger.navigator.keep()
    assert [path.name for path in cache.iterdir()] == ["killed.123"]
    debugger = opened(log)
    debugger.goto_end()
    debugger.navigator.keep()
    assert not list(cache.iterdir())


def no_room(self, target):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))


def test_only_long_sound_logs_are_kept(cache, log, tmp_path, monkeypatch):
    debugger = opened(write_broken(tmp_path / "broken", "over_budget"), Findings())
    debugger.goto_end()
    debugger.navigator.keep()
    monkeypatch.setattr(navigator, "MIN_RECORDS", 10_000)
    debugger = opened(log)
    debugger.goto_end()
    debugger.navigator.keep()
    assert not cache.exists()
    monkeypatch.setattr(navigator, "MIN_RECORDS", 50)
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the folder's place")
    debugger.navigator.keep()
    assert cache.read_text()


def test_the_oldest_states_are_deleted(cache, log, tmp_path, monkeypatch):
    _, path = kept(log, cache)
    monkeypatch.setattr(kept_states, "MAX_CACHED_BYTES", int(1.5 * path.stat().st_size))
    busy_run(tmp_path / "second", num_requests=24)
    debugger = opened(tmp_path / "second")
    debugger.goto_end()
    debugger.navigator.keep()
    (left,) = cache.iterdir()
    assert left != path
    assert any(isinstance(each.event, ev.Checkpoint) for each in LogReader(log))

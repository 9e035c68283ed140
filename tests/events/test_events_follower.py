"""Tests LogFollower, which reads a log while it is written."""

import pytest

from mmengine.errors import CorruptLog
from mmengine.events import follower as follow
from mmengine.events.follower import LogFollower
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.summaries import ended_requests
from tests.replay.runs import busy_run


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    busy_run(folder, num_requests=10)
    return list(LogReader(folder))


def test_records_come_as_they_are_committed(records, tmp_path):
    """Small segments make the log begin new files during the test."""
    writer = LogWriter(tmp_path, segment_bytes=4096)
    left, seen = list(records), []

    def wait():
        for record in left[:3]:
            writer.append(record.event, record.step, record.mono_ns)
        writer.commit()
        more = bool(left)
        del left[:3]
        return more

    for record in LogFollower(tmp_path, wait):
        seen.append(record)
        assert len(seen) <= len(records) - len(left), "no record is returned before it was committed"
    writer.close()
    assert [(r.sequence, r.step, r.event) for r in seen] == [(r.sequence, r.step, r.event) for r in records]
    assert len(list(tmp_path.glob("*.mmlog*"))) > 2


def test_half_a_record_is_waited_for(records, tmp_path):
    writer = LogWriter(tmp_path / "whole")
    for record in records:
        writer.append(record.event, record.step, record.mono_ns)
        writer.commit()
    writer.close()
    (path,) = (tmp_path / "whole").glob("*.mmlog")
    data, part = path.read_bytes(), tmp_path / "part"
    part.mkdir()
    sizes = iter(range(0, len(data) + 97, 97))

    def wait():
        size = next(sizes, None)
        if size is None:
            return False
        (part / path.name).write_bytes(data[:size])
        return True

    assert [record.event for record in LogFollower(part, wait)] == [record.event for record in records]


def test_damage_before_another_segment_is_refused(records, tmp_path):
    writer = LogWriter(tmp_path, segment_bytes=4096)
    for record in records:
        writer.append(record.event, record.step, record.mono_ns)
        writer.commit()
    writer.close()
    path = min(tmp_path.glob("*.mmlog*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLog):
        list(LogFollower(tmp_path, lambda: False))


def test_a_segment_that_is_packed_meanwhile(records, tmp_path, monkeypatch):
    """A packed segment's file disappears between listing the folder and opening the file."""
    writer = LogWriter(tmp_path / "log")
    for record in records:
        writer.append(record.event, record.step, record.mono_ns)
    writer.close()
    (path,) = (tmp_path / "log").glob("*.mmlog")
    hidden, real = tmp_path / "hidden", follow.open_segment

    def vanishing(asked):
        if not hidden.exists():
            path.rename(hidden)
        return real(asked)

    def wait():
        if path.exists():
            return False
        hidden.rename(path)
        hidden.touch()
        return True

    monkeypatch.setattr(follow, "open_segment", vanishing)
    seen = [record.event for record in LogFollower(tmp_path / "log", wait)]
    assert seen == [record.event for record in records]


def test_a_fold_follows(records, tmp_path):
    """`ended_requests` can read a log while it is written."""
    writer = LogWriter(tmp_path)
    left = list(records)

    def wait():
        for record in left[:50]:
            writer.append(record.event, record.step, record.mono_ns)
        writer.commit()
        more = bool(left)
        del left[:50]
        return more

    ends = [line.request_id for line in ended_requests(CheckedLog(tmp_path, wait))]
    writer.close()
    finished = [r.event.request_id for r in records if type(r.event).__name__ == "Finished"]
    assert ends == [name for name in finished if name in ends] and len(ends) > 5

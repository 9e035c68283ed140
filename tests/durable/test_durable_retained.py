"""Tests that successive processes can continue a log, and that answers stay correct after the oldest segments
are deleted.
"""

import errno
import os
from pathlib import Path

import pytest

from mmengine.core import continuation
from mmengine.core.continuation import open_log
from mmengine.core.resume import Resume, read_resume_state
from mmengine.events import retention as packing
from mmengine.events import snapshots as snapshot_files
from mmengine.events.fsck import fsck
from mmengine.events.log import LogReader
from mmengine.events.segment import segment_paths, snapshot_sequences
from mmengine.replay import request_lines, step_lines, verify
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.request_events import request_events
from mmengine.replay.queries.why import why
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import request, settings_of
from tests.log_copies import copied

KEPT = 30_000  # bytes


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Make segments and the distance between snapshots small."""
    monkeypatch.setattr(continuation, "MIN_PART_BYTES", 2000)


class Server:
    """An engine that begins or continues a log. `tokens`: request id -> tokens that the caller received."""

    def __init__(self, folder, tokens, **settings):
        self.folder, self.tokens, self.ended = folder, tokens, set()
        self.config = settings_of(log_retain_bytes=KEPT, max_in_flight=2, **settings)
        opened = open_log(folder, Resume(), self.config, reserve_bytes=0)
        self.core = opened.core(self.config, SimulatedExecutor(self.config), {})
        if opened.resumed is not None:
            self.core.recover(opened.resumed.recovered(()))
            for name, answer in opened.resumed.answers.items():
                tokens[name] = list(answer.token_ids)
                if answer.reason:
                    self.ended.add(name)

    def answer(self, numbers, keep=()):
        """Submit requests by number, a few at a time. `keep`: requests whose answers are not delivered."""
        numbers = list(numbers)
        while numbers:
            while numbers and len(self.core.state.requests) + len(self.core.inbox.queued) < 4:
                one = asked(numbers.pop(0))
                self.core.submit(one)
                self.tokens[one.request_id] = []
            self.step(keep)

    def step(self, keep=()):
        for output in self.core.step():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended.add(output.request_id)
        for name in self.ended - set(keep):
            self.core.delivered(name)
            self.ended.discard(name)
        self.tidy()

    def tidy(self):
        self.core.sink._tidy_at = 0.0
        self.core.tidy()

    def killed(self):
        """Return a copy of the folder in the state after a kill."""
        dead = copied(self.folder, self.folder.with_name(self.folder.name + "'"))
        self.core.sink.close()
        return dead


def asked(number):
    return request(f"r{number}", 5 + number % 9, max_tokens=4 + number % 13)


def test_a_log_of_three_lives_of_which_little_is_kept(tmp_path):
    # Three processes are killed, and a fourth finishes all requests. Most old segments are deleted meanwhile.
    folder, tokens = tmp_path / "log", {}
    for life in range(3):
        server = Server(folder, tokens)
        server.answer(range(60 * life, 60 * life + 60), keep={"r100"})
        folder = server.killed()
    server = Server(folder, tokens)
    assert "r100" in server.ended, "its answer outlived a process that never had it delivered"
    while server.core.has_work:
        server.step()
    server.core.close()
    assert tokens == {f"r{n}": reference_tokens(asked(n), server.config)[0] for n in range(180)}
    first = LogReader(folder).first_sequence
    report = verify(folder)
    assert first > 500 and report.ok and report.begins_after >= first - 1 and not report.unfinished
    assert fsck(folder).exit_code == 0
    assert any(path.name.endswith(".zst") for path in segment_paths(folder))
    lines, steps = request_lines(folder), list(step_lines(folder))
    assert 5 < len(lines) < 100 and steps
    assert why(folder, lines[-1].request_id) and list(
        request_events(CheckedLog(folder), lines[-1].request_id)
    )
    assert sum(path.stat().st_size for path in folder.glob("*.mm*")) < 4 * KEPT


def test_one_old_request_keeps_all_later_segments_without_more_work(tmp_path, monkeypatch):
    """Until the request's answer is delivered, no later segment is deleted, and `tidy` does not list the
    folder.
    """
    server = Server(tmp_path / "log", {})
    server.answer(range(30))
    first = LogReader(server.folder).first_sequence
    server.answer([100], keep={"r100"})
    server.answer(range(30, 90), keep={"r100"})
    pinned = LogReader(server.folder).first_sequence
    assert first < pinned and "r100" in read_resume_state(server.folder, Resume()).answers
    server.answer(range(101, 141), keep={"r100"})
    server.tidy()
    assert LogReader(server.folder).first_sequence == pinned
    listed = []
    monkeypatch.setattr(packing, "snapshot_sequences", lambda folder: listed.append(folder) or [])
    monkeypatch.setattr(Path, "glob", lambda self, pattern: listed.append(self) or iter(()))
    for _ in range(20):
        server.tidy()
    monkeypatch.undo()
    assert not listed
    monkeypatch.setattr(continuation, "MIN_PART_BYTES", 2000)
    server.answer(range(141, 160))
    assert LogReader(server.folder).first_sequence > pinned, "delivered, it holds nothing any more"
    server.core.close()
    assert verify(server.folder).ok


def test_snapshots_are_few(tmp_path):
    server = Server(tmp_path / "log", {}, snapshot_bytes=300)
    server.answer(range(60))
    server.core.close()
    assert len(snapshot_sequences(server.folder)) <= len(segment_paths(server.folder)) + 3


@pytest.mark.parametrize("what", ["snapshot", "pack"])
def test_a_full_disk_costs_only_a_snapshot_or_a_packed_segment(tmp_path, monkeypatch, what):
    server = Server(tmp_path / "log", {})
    server.answer(range(20))
    before = snapshot_sequences(server.folder), set(server.folder.glob("*.zst"))

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "snapshot":
        monkeypatch.setattr(snapshot_files, "write_whole", full)
    else:
        monkeypatch.setattr(packing, "pack", full)
    server.answer(range(20, 50))
    found = snapshot_sequences(server.folder), set(server.folder.glob("*.zst"))
    if what == "snapshot":
        assert set(found[0]) <= set(before[0]), "none was written"
    else:
        assert found[1] <= before[1], "none was packed"
    assert not list(server.folder.glob("*.part"))
    dead = server.killed()
    monkeypatch.undo()
    monkeypatch.setattr(continuation, "MIN_PART_BYTES", 2000)
    server = Server(dead, server.tokens)
    server.answer(range(50, 80))
    while server.core.has_work:
        server.step()
    server.core.close()
    assert server.tokens == {f"r{n}": reference_tokens(asked(n), server.config)[0] for n in range(80)}
    assert verify(dead).ok and fsck(dead).exit_code == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d[:-1],
        lambda d: d[:40] + bytes([d[40] ^ 1]) + d[41:],
        lambda d: b"",
        lambda d: b"MMXX" + d[4:],
    ],
)
def test_fsck_tells_of_a_damaged_snapshot(tmp_path, spoil):
    server = Server(tmp_path / "log", {})
    server.answer(range(12))
    server.core.close()
    assert fsck(server.folder).exit_code == 0
    (path, *_) = server.folder.glob("*.mmsnap")
    path.write_bytes(spoil(path.read_bytes()))
    report = fsck(server.folder)
    assert report.exit_code == 4 and path.name in report.findings[0].text

"""Tests that replay from any snapshot gives the same result as replay from record 0, even without the log's
first segments. Also tests how salvage (resuming from a damaged log) uses snapshots.
"""

import random
import shutil
from dataclasses import replace

import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.resume import Resume, read_resume_state
from mmengine.core.snapshot import snapshot
from mmengine.core.state.digest import state_digest
from mmengine.errors import CorruptLog
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.segment import segment_paths, snapshot_sequences
from mmengine.events.snapshots import SnapshotFolder
from mmengine.replay import open_log, request_lines, step_lines, verify
from mmengine.replay.checked_log import CheckedLog
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import image, request, settings_of
from tests.events.logs import drop_first

# Because `Resume.wanted` is set, `read_resume_state` reads the whole log.
ALL = Resume(wanted=lambda name: False)


def write_run(folder, **settings):
    config = settings_of(max_num_seqs=3, num_blocks=17, checkpoint_interval=4, **settings)
    writer = LogWriter(folder, segment_bytes=2500, pack_full=False)
    executor = SimulatedExecutor(config, fault=lambda step: "planted" if step == 20 else None)
    core = EngineCore(config, executor, sink=writer, snapshots=SnapshotFolder(folder, 1500))
    rng = random.Random(1)
    for number in range(24):
        media = [image(number % 3, 1, 4)] if number % 2 else []
        core.submit(request(f"r{number}", rng.randint(6, 20), max_tokens=rng.randint(2, 18), media=media))
        for _ in range(rng.randrange(6)):
            deliver(core)
    while core.has_work:
        deliver(core)
    core.close()
    return core


def deliver(core):
    for output in core.step():
        if output.finish_reason is not None:
            core.delivered(output.request_id)


@pytest.fixture(scope="module", params=[1, 2])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    return folder, write_run(folder, max_in_flight=request.param)


def test_verify_from_each_snapshot(run):
    folder, core = run
    whole = verify(folder)
    assert whole.ok and whole.begins_after == -1
    snapshots = snapshot_sequences(folder)
    assert len(snapshots) > 5
    for sequence in snapshots:
        report = verify(folder, after=sequence + 1)
        assert report.ok and report.rederived and report.begins_after == sequence
        assert report.events == whole.events - sequence - 1 and not report.unfinished
    assert verify(folder, after=10**9).begins_after == snapshots[-1]
    assert verify(folder, after=0).begins_after == -1


def test_a_snapshot_equals_the_folded_state(run):
    folder, _ = run
    digests = {record.sequence: state for state, record in walk(folder)}
    for sequence in snapshot_sequences(folder):
        assert state_digest(CheckedLog(folder, after=sequence + 1).first_state()) == digests[sequence]


def walk(folder):
    state = CheckedLog(folder).first_state()
    log = CheckedLog(folder)
    for record in log:
        log.apply(state, record.event)
        yield state_digest(state), record


def test_a_log_without_its_beginning(run, tmp_path):
    folder, core = run
    old = tmp_path / "old"
    old.mkdir()
    for path in folder.iterdir():
        (old / path.name).write_bytes(path.read_bytes())
    drop_first(old, 3)
    first = LogReader(old).first_sequence
    report = verify(old)
    assert report.ok and report.rederived and report.begins_after >= first - 1 > 0
    assert request_lines(old) and list(step_lines(old))
    steps = list(open_log(old).steps())
    assert steps and state_digest(steps[-1].state)
    for sequence in snapshot_sequences(old):
        (old / f"snapshot-{sequence:020d}.mmsnap").write_bytes(b"nonsense")
    with pytest.raises(CorruptLog):
        verify(old)


def test_a_damaged_snapshot_is_skipped(run, tmp_path):
    folder, _ = run
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    *_, before, last = snapshot_sequences(copy)
    path = copy / f"snapshot-{last:020d}.mmsnap"
    path.write_bytes(path.read_bytes()[:-1])
    assert verify(copy, after=10**9).begins_after == before
    assert snapshot.newest_before(copy, 10**9)[1].sequence == before


def damage(folder, number):
    path = segment_paths(folder)[number]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_salvage_uses_records_after_damage_and_a_snapshot(run, tmp_path):
    """Salvage uses a snapshot after the damage and the later records, if no request needs an answer from
    before the snapshot. The test damages segment after segment until salvage succeeds.
    """
    whole = read_resume_state(run[0], ALL)
    for number in range(1, 8):
        folder = shutil.copytree(run[0], tmp_path / f"log-{number}")
        damage(folder, number)
        last = snapshot_sequences(folder)[-1]
        assert verify(folder, after=last + 1).ok
        for mode in ("strict", "tail"):
            with pytest.raises(CorruptLog):
                read_resume_state(folder, replace(ALL, mode=mode))
        assert read_resume_state(folder, Resume()).steps == whole.steps, "the damaged segment is not read"
        try:
            salvaged = read_resume_state(folder, replace(ALL, mode="salvage"))
        except CorruptLog as error:
            assert "a request that still needs its answer" in str(error)
            continue
        ((name, _, num_bytes),) = salvaged.cuts
        assert name == segment_paths(folder)[number].name and num_bytes > 0, "the cut part is reported"
        assert not salvaged.answers and state_digest(salvaged.state) == state_digest(whole.state)
        return
    pytest.fail("no damage could be salvaged")


def test_a_gap_in_a_wanted_answer_is_refused(run, tmp_path):
    """Salvage refuses a log if the caller wants an answer that began before the damage."""
    folder = shutil.copytree(run[0], tmp_path / "log")
    damage(folder, 1)
    with pytest.raises(CorruptLog, match="are lost"):
        read_resume_state(folder, Resume(mode="salvage", wanted=lambda name: name == "r0"))
    for path in folder.glob("*.mmsnap"):
        path.unlink()
    with pytest.raises(CorruptLog, match="are lost"):
        read_resume_state(folder, Resume(mode="salvage"))

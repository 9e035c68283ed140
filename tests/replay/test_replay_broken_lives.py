"""Tests log commands (rerun, minimize, report) on logs from several processes and on logs without the first
segments.
"""

import pytest

from mmengine.core.continuation import open_log
from mmengine.core.engine import EngineCore
from mmengine.core.resume import Resume
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.replay import replay_failure, request_lines, step_lines, verify
from mmengine.replay.report import write_report
from mmengine.replay.rerun.rerun import rerun
from mmengine.replay.rerun.script import read_script
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.events.logs import drop_first
from tests.log_copies import copied
from tests.replay.test_replay_from_snapshot import write_run
from tests.replay.test_replay_report import unpack


def write_crashed(folder, in_flight):
    """Write a log in which the process dies at step 12. A second process, whose clock starts at zero,
    continues the requests.
    """
    config = settings_of(max_num_seqs=3, num_blocks=17, max_in_flight=in_flight)
    executor = SimulatedExecutor(config)
    log = LogWriter(folder)
    core = EngineCore(config, executor, sink=log, clock=lambda: 10**15 + executor.clock_ns)
    for number in range(8):
        core.submit(request(f"r{number}", 9 + number, max_tokens=30))
    while core.state.step < 12:
        core.step()
    second = SimulatedExecutor(config)
    core = EngineCore(config, second, sink=log, clock=lambda: second.clock_ns, state=core.state)
    core.recover(ev.Recovered(steps=(12,)))
    while core.has_work:
        core.step()
    core.close()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_log_of_two_processes(tmp_path, in_flight):
    log, page = tmp_path / "log", tmp_path / "page.html"
    write_crashed(log, in_flight)
    assert verify(log).ok
    assert replay_failure(log, "any") is None
    assert rerun(log, {}).is_exact
    result = rerun(log, {}, exact=False)
    assert any("the log contains a crash" in note for note in result.notes)
    assert 0 < result.logged.numbers["end_to_end_ms_p99"] < 1000, "no clock difference is counted"
    assert result.logged.numbers["output_tokens"] == 8 * 30
    write_report(log, page)
    data = unpack(page.read_text())
    assert data["notes"][0][1] == "the process ended, and another process continued"
    assert (data["step_time_ms"][1:] >= data["step_time_ms"][:-1]).all()
    assert data["lane_answer"].tolist() == [30] * 8 and set(data["ends"]) == {"length"}
    assert data["step_failed"].sum() >= 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_log_without_its_beginning(tmp_path, in_flight):
    log, page = tmp_path / "log", tmp_path / "page.html"
    write_run(log, max_in_flight=in_flight)
    whole = {line.request_id: line.num_output_tokens for line in request_lines(log)}
    drop_first(log, 4)
    lines, steps = request_lines(log), list(step_lines(log))
    assert len(lines) < len(whole)
    script = read_script(log)
    assert {name: len(answer.tokens) for name, answer in script.answers.items()} == {
        name: count for name, count in whole.items() if name in script.answers
    }
    assert replay_failure(log, "any") is None
    assert rerun(log, {}).again.numbers["steps"] > 0
    write_report(log, page)
    data = unpack(page.read_text())
    assert {name: int(n) for name, n in zip(data["ids"], data["lane_answer"], strict=True)} == {
        name: whole[name] for name in data["ids"]
    }
    # The page may lack the steps that are in flight at the first record.
    shown = [line for line in steps if line.step >= data["first_step"]]
    assert len(shown) >= len(steps) - (in_flight if in_flight > 1 else 0)
    # The page may also show a step that was decided before the first record.
    assert len(shown) <= len(data["step_tokens"]) <= len(shown) + 1
    assert data["step_tokens"].tolist()[-len(shown) :] == [line.num_tokens for line in shown]
    times = data["step_device_ms"].tolist()[-len(shown) :]
    assert times == pytest.approx([line.device_ms for line in shown])


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_crashed_step_verifies_at_each_crash_point(tmp_path, in_flight):
    """A process is killed after each step, and the next process records the step as crashed. Each resulting
    log verifies.
    """
    config = settings_of(max_in_flight=in_flight, checkpoint_interval=3)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log", reserve_bytes=0))
    for number in range(6):
        core.submit(request(f"r{number}", 9, max_tokens=12))
    for step in range(30):
        core.step()
        dead = copied(tmp_path / "log", tmp_path / f"dead-{step}")
        opened = open_log(dead, Resume(), config, reserve_bytes=0)
        again = opened.core(config, SimulatedExecutor(config), {})
        again.recover(opened.resumed.recovered(()), "signal 11")
        while again.has_work:
            again.step()
        again.close()
        report = verify(dead)
        assert report.ok, (step, report.divergence)
    core.close()

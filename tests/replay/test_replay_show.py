"""Tests that the numbers in a log's tables equal the numbers recorded while the log was written."""

import pytest

from mmengine.core.engine import EngineCore
from mmengine.events.log import LogWriter
from mmengine.replay import request_lines, step_lines
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.replay.runs import busy_run


@pytest.fixture(scope="module", params=[0, 5])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    return folder, busy_run(folder, request.param)


def test_requests(run):
    folder, live = run
    lines = request_lines(folder)
    assert [line.request_id for line in lines] == live.queued
    for line in lines:
        name = line.request_id
        assert (line.num_prompt_tokens, line.num_media) == live.prompts[name]
        assert line.num_output_tokens == len(live.tokens[name])
        assert (line.finish_reason, line.detail, line.num_cached_tokens) == live.ends[name]
        assert (line.first_token_ns >= 0) == bool(live.tokens[name])
        assert line.end_ns >= line.first_token_ns and line.end_step >= line.queued_step
    stats = live.core.stats()
    assert sum(line.num_preemptions for line in lines) == stats.num_preemptions > 0
    assert sum(line.num_output_tokens for line in lines) == stats.num_output_tokens
    assert sum(line.num_prompt_tokens for line in lines) == stats.num_prompt_tokens


def test_steps(run):
    folder, live = run
    lines = list(step_lines(folder))
    seen = [
        (
            line.num_rows,
            line.num_tokens,
            line.num_admitted,
            line.num_encoded,
            line.num_running,
            line.num_waiting,
            line.num_free_blocks,
            line.encoder_used,
            line.failed,
        )
        for line in lines
    ]
    assert seen == live.steps
    assert [line.step for line in lines] == list(range(len(live.steps)))
    stats = live.core.stats()
    assert sum(line.num_preempted for line in lines) <= stats.num_preemptions
    assert sum(line.num_encoded for line in lines) == stats.num_encoded_items
    assert sum(line.device_ms for line in lines) == pytest.approx(stats.device_ns / 1e6)


def test_a_reused_id_is_a_new_request(tmp_path):
    config = settings_of()
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    for length in (3, 9):
        core.submit(request("same", length, max_tokens=2))
        while core.has_work:
            core.step()
    core.close()
    assert [line.num_prompt_tokens for line in request_lines(tmp_path / "log")] == [3, 9]


def test_a_request_without_an_end(tmp_path):
    config = settings_of()
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    core.submit(request("cut off", 3, max_tokens=9))
    core.step()
    core.step()
    core.sink.close()
    (line,) = request_lines(tmp_path / "log")
    assert (line.finish_reason, line.end_ns, line.end_step, line.num_output_tokens) == ("", -1, -1, 1)

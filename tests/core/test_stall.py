"""Tests that the engine loop reports stalls, and that `verify` accepts a log with stalls."""

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.errors import MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.replay.runs import thrashing_core


def stalls(folder):
    return [record.event for record in LogReader(folder) if isinstance(record.event, ev.Stalled)]


def request(name, length, max_tokens=30):
    return Request(name, np.full(length, len(name), np.int32), SamplingParams(max_tokens=max_tokens, seed=0))


def test_a_request_that_is_preempted_again_and_again_is_named_once(tmp_path):
    core = thrashing_core(tmp_path / "log")
    for _ in range(400):
        core.step()
    core.close()
    named = stalls(tmp_path / "log")
    assert [(stall.kind, stall.request_id) for stall in named] == [("thrash", "other"), ("thrash", "first")]
    assert "3 times without a token" in named[0].detail
    assert core.stats().num_thrashes == len(named) == 2
    assert core.last_stall[1] == named[-1]
    assert verify(tmp_path / "log").ok


def test_no_progress_is_an_error_and_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr("mmengine.core.decide.scheduler.Scheduler.schedule", lambda self, view: None)
    config = EngineConfig(
        max_num_seqs=2, token_budget=16, max_model_len=40, num_blocks=11, encoder_cache_size=64
    )
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    core.submit(request("waits", 8))
    with pytest.raises(MMEngineError, match="no progress at step 0: 0 requests run, 1 wait, 10 of 10 blocks"):
        core.step()
    assert [stall.kind for stall in stalls(tmp_path / "log")] == ["no progress"]
    assert core.stats().num_no_progress == 1 and core.last_stall[0] == 0
    report = verify(tmp_path / "log")
    assert report.ok, report.divergence


def test_waiting_for_a_grammar_is_no_stall():
    config = EngineConfig(
        max_num_seqs=2, token_budget=16, max_model_len=40, num_blocks=11, encoder_cache_size=64
    )
    core = EngineCore(config, SimulatedExecutor(config))
    prompt = np.zeros(4, np.int32)
    core.submit(
        Request("a", prompt, SamplingParams(max_tokens=2, seed=0), grammar=GrammarRequest("regex", "a"))
    )
    for _ in range(5):
        assert not core.step()
    core.inbox.put(ev.GrammarReady("a"))
    while core.has_work:
        core.step()
    assert core.stats().num_finished == 1 and core.stats().num_no_progress == 0

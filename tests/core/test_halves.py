"""Tests a HostDrivenCore, which begins and finishes a step in separate calls. Drafts arrive after the step's
result.
"""

import numpy as np
import pytest

from mmengine.core.host_driven import HostDrivenCore
from mmengine.errors import ExecutorFailed
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.halves import host_config, run_in_halves
from tests.core.small_engine import request, settings_of


@pytest.mark.parametrize("seed", range(12))
def test_a_host_gets_the_right_tokens_and_its_log_verifies(tmp_path, seed):
    config = host_config(seed)
    answers = run_in_halves(config, seed, tmp_path / "log")
    assert any(tokens for _, _, tokens in answers)
    for reference, is_whole, tokens in answers:
        assert tokens == (reference if is_whole else reference[: len(tokens)])
    report = verify(tmp_path / "log", invariants=True)
    assert report.divergence is None and report.rederived


def test_late_drafts_are_an_event_of_their_own(tmp_path):
    seed = next(seed for seed in range(99) if host_config(seed).num_draft_tokens == 3)
    run_in_halves(host_config(seed), seed, tmp_path)
    events = [record.event for record in LogReader(tmp_path)]
    assert any(isinstance(event, ev.Drafted) and event.drafts for event in events)
    executed = [event for event in events if isinstance(event, ev.Executed)]
    assert not any(event.drafts for event in executed)
    assert any(event.counts and max(np.frombuffer(event.counts, np.int32)) > 1 for event in executed)


def test_drafts_that_do_not_fit_the_state_are_refused():
    config = settings_of(num_draft_tokens=2)
    core = HostDrivenCore(config, SimulatedExecutor(config))
    core.submit(request("a", 4, max_tokens=9))
    core.begin_step()
    (row,) = core.state.running.tolist()
    drafts = np.array([5, 6], np.int32)
    with pytest.raises(ExecutorFailed, match="while a step is open or in flight"):
        core.propose(np.array([row]), np.array([2]), drafts)
    core.finish_step()
    for rows, counts, what in (
        ([row + 1], [2], "rows that do not run"),
        ([row, row], [1, 1], "twice for a row"),
        ([row], [1], "do not fit num_draft_tokens 2"),
        ([row], [3], "do not fit num_draft_tokens 2"),
    ):
        with pytest.raises(ExecutorFailed, match=what):
            core.propose(np.array(rows), np.array(counts), drafts)

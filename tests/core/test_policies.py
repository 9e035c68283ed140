"""Tests the lookup of scheduling policies (by name, registration or entry point), and the policy
prefill_first.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest

from mmengine import registry
from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.state.policy import Policy, policy_named, register_policy
from mmengine.errors import ConfigError
from mmengine.request import Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor

ROOT = Path(__file__).parents[2]


class Point:
    name, value, dist = "theirs", "somewhere:policy", None

    def __init__(self, loaded):
        self.loaded = loaded

    def load(self):
        return self.loaded


def test_an_entry_point_is_found_by_name(monkeypatch):
    theirs = Policy(lambda req_state: (0,), lambda view: 0)
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point(theirs)])
    assert policy_named("theirs") is theirs
    with pytest.raises(ConfigError, match="fcfs, prefill_first, priority,.* theirs"):
        policy_named("nobody's")
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point("text")])
    with pytest.raises(ConfigError, match="somewhere:policy is no Policy"):
        policy_named("theirs")


def test_a_name_is_registered_once():
    with pytest.raises(ConfigError, match="'fcfs' already"):
        register_policy("fcfs", Policy(lambda req_state: (0,), lambda view: 0))
    register_policy("fcfs", policy_named("fcfs"))


def test_prefill_first_lets_decodes_wait():
    config = EngineConfig(
        encoder_cache_size=64,
        max_num_seqs=4,
        token_budget=8,
        max_model_len=64,
        block_size=8,
        num_blocks=40,
        policy="prefill_first",
    )
    core = EngineCore(config, SimulatedExecutor(config))
    core.submit(Request("first", np.arange(4, dtype=np.int32), SamplingParams(max_tokens=20, seed=0)))
    core.step()
    core.step()
    core.submit(Request("long", np.arange(20, dtype=np.int32), SamplingParams(max_tokens=2, seed=0)))
    seen = []
    for _ in range(6):
        seen.append([output.request_id for output in core.step()])
    assert seen[:5] == [["first"], [], [], ["long"], ["first", "long"]]


@pytest.mark.long
def test_the_example_shortens_the_mean(capsys):
    """The example's policy shortens the mean end time by more than 20 %."""
    runpy.run_path(str(ROOT / "examples" / "shortest_remaining.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    fcfs, shortest = (float(line.split(":")[1].split()[0]) for line in lines)
    assert shortest < 0.8 * fcfs

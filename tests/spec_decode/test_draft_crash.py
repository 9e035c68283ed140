"""Tests that, after a crash with drafts in flight, another process continues and gives the same answers."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from tests.log_copies import copied
from tests.spec_decode.draft_control import Clock
from tests.spec_decode.equality import Asked, Scripted, answers, assert_same, drawn_alike, known_as, mixed

POOL = {"draft_policy": "all", "num_blocks": 30, "max_num_seqs": 6, "token_budget": 60, "max_model_len": 256}


def drafts_in_flight(folder):
    """Return how many drafts the log's last step leaves for the next step."""
    steps = [record.event for record in LogReader(folder) if isinstance(record.event, ev.Executed)]
    columns = steps[-1].num_drafts if steps else None
    return 0 if columns is None else int(np.frombuffer(columns, np.int32).sum())


@cache
def requests(in_forms, most_tokens):
    """Return nine requests, with grammars or without, and their answers without drafts."""
    everything = mixed(24, seed=12, most_tokens=most_tokens).by_id.items()
    bound = [(name, each) for name, each in everything if (each[1].grammar is not None) == in_forms]
    asked = Asked(dict(bound[:9]))
    return asked, answers(asked, spec="none", num_blocks=2049)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs requests and returns three copies of the log. The copies are made after
    about 20 %, 40 % and 60 % of the tokens. Each config runs only once.
    """
    copies = {}

    def run(in_forms, most_tokens, config):
        asked, want = requests(in_forms, most_tokens)
        key = in_forms, most_tokens, config.spec
        if key not in copies:
            folder, apart = tmp_path_factory.mktemp("run"), want.stats.num_output_tokens // 5
            copies[key] = copies_of_a_run(asked, folder, config, 3, apart)
        return copies[key]

    return run


def copies_of_a_run(asked, folder, config, count, apart):
    """Return `count` copies of the log. Copy n (from 1) is made after n * `apart` tokens or more, when a step
    left drafts for the next step.
    """
    copies = []
    with drawn_alike(), Engine(config=config, dtype="float32", log=folder / "log") as engine:
        Clock(engine.built.executor, turn=10**6)
        for prepared, options in asked.by_id.values():
            engine.submit_prepared(prepared, options)
        while not engine.is_idle:
            engine.step(received=False)
            due = engine.stats().num_output_tokens >= apart * (len(copies) + 1)
            if due and len(copies) < count and drafts_in_flight(folder / "log"):
                copies.append(copied(folder / "log", folder / f"copy{len(copies)}"))
    return copies


@pytest.mark.parametrize(
    "spec, policy, later",
    [
        ("auto", "all", "auto"),
        ("script", "all", "script"),
        ("eagle3", "goodput", "eagle3"),
        ("grammar", "all", "auto"),  # the first process has no KV cache for a draft head
        ("auto", "all", "grammar"),  # the later process has no KV cache for a draft head
        ("auto", "all", "eagle3"),
        ("eagle3", "all", "auto"),
    ],
)
def test_a_resumed_run_gives_the_same_answers(spec, policy, later, run, tmp_path):
    """Another process continues with the drafters `later`. With the policy goodput, the log has snapshots
    with the policy's state.
    """
    kind = bool({"auto", "grammar"} & {spec, later}), 40 if policy == "all" else 120
    asked, want = requests(*kind)
    config = EngineConfig(spec=spec, **{**POOL, "draft_policy": policy})
    if policy == "goodput":
        config = replace(config, snapshot_bytes=2000)
    with known_as("script", lambda max_rows: Scripted(want.truth)):
        copies = [copied(each, tmp_path / each.name) for each in run(*kind, config)]
        assert len(copies) == 3
        assert any(list(copy.glob("*.mmsnap")) for copy in copies) == (policy == "goodput")
        for copy in copies:
            assert_same(gone_on(asked, copy, replace(config, spec=later)), want)
            assert verify(copy).ok


def gone_on(asked, log, config):
    found = {}
    with Engine(config=config, dtype="float32", log=log, resume=Resume()) as engine:
        Clock(engine.built.executor, turn=10**6)
        for name, (_, options) in asked.by_id.items():
            ended = engine.requests.resume(name, options.sampling.n)
            if ended is not None:
                found[name] = ended
        while not engine.is_idle:
            for output in engine.step():
                if output.completion is not None:
                    found[output.request_id] = output.completion
        drafting = engine.built.executor._runner._drafting
        assert drafting.failures == [0] * len(drafting.failures)
    return SimpleNamespace(by_id=found)

"""Tests a multi-token-prediction head on prompts with images and videos. Drafts change no token, whether a
prompt is prefilled in a single step, in chunks, from cached recurrent states, or again after a preemption.
"""

import pytest

from mmengine.replay import verify
from tests.qwen3_5.mtp_heads import add_head
from tests.qwen3_5.test_qwen3_5_video import NUM_NEW, engine_of, prompts
from tests.qwen3_5.tiny import make_whole

SETTINGS = {
    "whole": {"enable_prefix_caching": False},
    "in chunks": {"enable_prefix_caching": False, "token_budget": 16, "max_num_seqs": 2},
    "from kept states": {"snapshot_every": 16, "token_budget": 32, "max_num_seqs": 8},
    "preempted": {"snapshot_every": 16, "num_blocks": 81, "max_model_len": 220, "max_num_seqs": 4},
}


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "mixture"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("media")
    add_head(made, make_whole(made, mixture=request.param))
    return made


@pytest.fixture(scope="module")
def wanted(folder):
    with engine_of(folder) as engine:
        return [each.token_ids for each in engine.generate(prompts(), max_tokens=NUM_NEW, ignore_eos=True)]


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_equal_those_without_drafts(folder, wanted, tmp_path, name):
    drafted = {"spec": "mtp", "draft_policy": "all", "num_draft_tokens": 3}
    with engine_of(folder, tmp_path / "log", **drafted | SETTINGS[name]) as engine:
        for _ in range(2):
            found = engine.generate(prompts(), max_tokens=NUM_NEW, ignore_eos=True)
            assert [each.token_ids for each in found] == wanted
        stats, drafting = engine.stats(), engine.built.executor._runner._drafting
    assert drafting.failures == [0]
    (counts,) = stats.drafts.values()
    print(f"{name}: {counts}")
    assert 0 < counts.accepted < counts.proposed
    assert (stats.num_cached_tokens > 0) is (name in ("from kept states", "preempted"))
    assert (stats.num_preemptions > 0) is (name == "preempted")
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok and report.rederived and not report.unfinished

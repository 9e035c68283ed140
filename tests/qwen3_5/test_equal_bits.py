"""Tests that a hybrid model is batch-invariant: log-probabilities have the same bits with any batching,
chunking, caching, preemption and drafting. Each run's log passes verification.
"""

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.replay import verify
from mmengine.serve.engine.engine import Engine
from tests.qwen3_5.tiny import make_text

SIZES = {
    "num_blocks": 257,
    "max_model_len": 256,
    "block_size": 4,
    "num_threads": 1,
    "batch_invariant": True,
    "enable_prefix_caching": False,
    "spec": "none",
}
ALONE = {"max_num_seqs": 1}
DRAFTED = {"spec": "suffix", "draft_policy": "all", "num_draft_tokens": 3}
SETTINGS = {
    "in chunks": {"token_budget": 8, "max_num_seqs": 5},
    "few slots": {"max_num_seqs": 2, "num_state_slots": 5, "enable_prefix_caching": True},
    "from short prompts' states": {"enable_prefix_caching": True, "snapshot_every": 0},
    "preempted": {"num_blocks": 48, "max_model_len": 160, "enable_prefix_caching": True, "snapshot_every": 8},
    "drafted": DRAFTED | {"enable_prefix_caching": True, "snapshot_every": 8},
}
BEGINNING = "What stands at the beginning of several prompts is computed once. "
PROMPTS = [
    *("a", "Hello", "Hello there", "Count: 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"),
    *(BEGINNING + end for end in ("And then?", "And then it ends.", "Or is it? " * 6)),
    *(BEGINNING * 2, "Two cats sat on a mat. " * 7),
]


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "mixture"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("hybrid")
    make_text(made, mixture=request.param)
    return made


def engine_of(folder, log=None, **settings):
    config = EngineConfig.from_dict({**SIZES, **settings})
    return Engine(folder, device="cpu", dtype="float32", config=config, log=log)


def answers(engine):
    """Return, for each prompt, the tokens and the log-probabilities."""
    found = engine.generate(PROMPTS, max_tokens=24, ignore_eos=True, logprobs=2)
    return [
        (each.token_ids, [[score for _, score in one] for one in each.choices[0].logprobs]) for each in found
    ]


@pytest.fixture(scope="module")
def alone(folder):
    with engine_of(folder, **ALONE) as engine:
        return answers(engine)


@pytest.mark.parametrize("name", SETTINGS)
def test_bits_equal_a_single_row(folder, alone, tmp_path, name):
    with engine_of(folder, tmp_path / "log", **SETTINGS[name]) as engine:
        for _ in range(2):
            for (tokens, scores), (wanted, exact) in zip(answers(engine), alone, strict=True):
                assert tokens == wanted
                assert np.array_equal(scores, exact)
        stats = engine.stats()
    if name != "few slots":  # With few slots, states may be evicted before a request can use them.
        assert (stats.num_cached_tokens > 0) is bool(SETTINGS[name].get("enable_prefix_caching"))
    assert (stats.num_preemptions > 0) is (name == "preempted")
    assert (sum(each.accepted for each in stats.drafts.values()) > 0) is (name == "drafted")
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok and report.rederived and not report.unfinished

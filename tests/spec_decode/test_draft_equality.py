"""Tests that drafts change no answer: tokens, finish reasons, logprobs and texts stay equal."""

import random

import pytest

from mmengine.replay.verify import verify
from mmengine_shapes import draft_head_path
from tests.spec_decode.draft_control import Clock, Granting
from tests.spec_decode.equality import Scripted, answers, assert_same, known_as, mixed

LONGEST = {"max_model_len": 112}
WIDE = {"num_blocks": 2049, **LONGEST}
# RECOMPUTE and SWAP prefill prompts and media in chunks, and preempt requests for lack of KV blocks.
RECOMPUTE = {
    "num_blocks": 9,
    "max_num_seqs": 9,
    "token_budget": 24,
    "enable_prefix_caching": False,
    **LONGEST,
}
SWAP = {
    **RECOMPUTE,
    "token_budget": 33,
    "swap_blocks": 60,
    "preempt_mode": "swap",
    "enable_prefix_caching": True,
}

# Settings with different drafters, draft limits, and numbers of verified drafts.
WAYS = {
    "auto": {"spec": "auto", **RECOMPUTE},
    "ngram": {"spec": "ngram", **SWAP},
    "suffix": {"spec": "suffix", **SWAP},
    "head": {"spec": f"eagle3={draft_head_path()}", **SWAP},
    "grammar": {"spec": "grammar", **SWAP},
    "auto, none and all": {
        "spec": "auto",
        "steer": lambda executor: Granting(executor, lambda step: 0 if step % 3 == 2 else None),
        **SWAP,
    },
    "auto, as many as pay": {"spec": "auto", "draft_policy": "goodput", "steer": Clock, **SWAP},
    "head, as many as pay": {
        "spec": f"eagle3={draft_head_path()}",
        "draft_policy": "goodput",
        "steer": Clock,
        **RECOMPUTE,
    },
    "head, none and seven": {
        "spec": f"eagle3={draft_head_path()}",
        "num_draft_tokens": 7,
        "steer": lambda executor: Granting(executor, lambda step: 0 if step % 2 else None),
        **SWAP,
    },
}


def check(asked, model, log):
    """Compare the answers without drafts to answers with each setting in WAYS and with scripted drafters."""
    kinds = asked.kinds()
    assert len(kinds) == 12 and min(kinds.values()) > 0, kinds
    want = answers(asked, model, **WIDE, spec="none")
    assert want.drafting is None
    report = []

    def same(name, **settings):
        found = answers(asked, model, log / name, random.Random(1), **settings)
        assert_same(found, want)
        assert found.drafting.failures == [0] * len(found.drafting.failures) and verify(log / name).ok
        assert bool(found.stats.num_preemptions) == (settings["num_blocks"] < 2049)
        drafts = [counts for _, counts in sorted(found.stats.drafts.items())]
        report.append(f"{name}: {found.stats.steps} steps, {'; '.join(map(str, drafts)) or 'no drafts'}")
        return sum(counts.proposed for counts in drafts)

    num_drafts = {name: same(name, **settings) for name, settings in WAYS.items()}
    assert num_drafts["head, as many as pay"] and num_drafts["head, none and seven"]
    for number, pool in enumerate((WIDE, RECOMPUTE, SWAP)):
        script = Scripted(want.truth, number, most_of=_switched if number == 2 else lambda step: 99)
        with known_as("script", script):
            same(f"script {number}", spec="script", **pool)
        assert script.num_true > len(asked)
    print(
        f"{len(asked)} requests, {dict(kinds)}, {want.stats.steps} steps without drafts; " + "\n".join(report)
    )


def _switched(step):
    return 7 * (step % 2)


@pytest.mark.parametrize("weights", [pytest.param("trained", marks=pytest.mark.soak), "random"])
def test_answers_are_the_same(weights, random_weights, tmp_path):
    check(mixed(22, len(weights), most_tokens=20), random_weights if weights == "random" else None, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_answers_of_many_are_the_same(weights, random_weights, tmp_path):
    check(
        mixed(250, seed=100 + len(weights), most_tokens=80),
        random_weights if weights == "random" else None,
        tmp_path,
    )

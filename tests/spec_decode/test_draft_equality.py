"""Answers with drafts are the answers without: tokens, ends, likelihoods and texts."""

import random

import pytest

from mmengine.replay.verify import verify
from mmengine_shapes import draft_head_path
from tests.spec_decode.equality import Scripted, answers, assert_same, known_as, mixed

WIDE = {"num_blocks": 2049}
# Each cuts prompts and images, and its pool is too small for what runs.
RECOMPUTE = {"num_blocks": 18, "max_num_seqs": 9, "token_budget": 24, "enable_prefix_caching": False}
SWAP = {"num_blocks": 18, "max_num_seqs": 9, "token_budget": 33, "swap_blocks": 60, "preempt_mode": "swap"}


def check(asked, model, log):
    """With each drafter, each in another pool."""
    want = answers(asked, model, **WIDE, spec="none")
    assert want.drafting is None
    report = []
    for number, spec in enumerate(("auto", "ngram", "suffix", f"eagle3={draft_head_path()}")):
        name, pool = spec.partition("=")[0], (RECOMPUTE, SWAP, WIDE, SWAP)[number]
        found = answers(asked, model, log / name, random.Random(1), spec=spec, **pool)
        assert_same(found, want)
        report.append(f"{name}: {found.stats.steps} steps, {found.stats.num_preemptions} preemptions")
        assert found.drafting.failures == [0] and verify(log / name).ok
    for number, pool in enumerate((WIDE, RECOMPUTE, SWAP)):
        script = Scripted(want.truth, number, most_of=(lambda step: 99, lambda step: 99, _switched)[number])
        with known_as("script", script):
            found = answers(asked, model, log / f"s{number}", random.Random(2), spec="script", **pool)
        assert_same(found, want)
        assert found.drafting.failures == [0] and verify(log / f"s{number}").ok
        assert script.num_true > len(asked)
        report.append(f"scripted: {found.stats.steps} steps, {found.stats.num_preemptions} preemptions")
    print(f"{len(asked)} requests, {want.stats.steps} steps without drafts; " + "; ".join(report))


def _switched(step):
    return 7 * (step % 2)


@pytest.mark.parametrize("weights", ["trained", "random"])
def test_answers_are_the_same(weights, random_weights, tmp_path):
    check(mixed(25, seed=len(weights)), random_weights if weights == "random" else None, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_answers_of_many_are_the_same(weights, random_weights, tmp_path):
    check(
        mixed(250, seed=100 + len(weights), most_tokens=80),
        random_weights if weights == "random" else None,
        tmp_path,
    )

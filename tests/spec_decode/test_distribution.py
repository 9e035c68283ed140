"""Tests that tokens sampled with drafts have the same distribution as tokens sampled without drafts.

Other tests require equal tokens for equal seeds. This test compares the token counts from two runs with
different seeds.
"""

from collections import Counter

import pytest

from mmengine.config import EngineConfig
from mmengine.serve.engine.engine import Engine

pytest.importorskip("mmengine_shapes")
NUM_ANSWERS, NUM_TOKENS, FEW = 600, 8, 12
HOW = {"temperature": 1.3, "max_tokens": NUM_TOKENS, "ignore_eos": True}


def sampled(spec, first_seed):
    """Return the answers' token ids for one prompt and NUM_ANSWERS seeds, and the number of engine steps."""
    with Engine(config=EngineConfig(spec=spec, draft_policy="all")) as engine:
        prompt = [{"role": "user", "content": "Describe a red star and a blue circle."}]
        ids = [engine.submit(prompt, seed=first_seed + number, **HOW) for number in range(NUM_ANSWERS)]
        found = {}
        while len(found) < NUM_ANSWERS:
            for output in engine.step():
                if output.completion is not None:
                    found[output.request_id] = output.completion
        steps = engine.stats().steps
    return [found[name].token_ids for name in ids], steps


def chi_square(one, other):
    """Return the chi-square statistic for two lists, and its 99.9 % quantile (Wilson and Hilferty's
    approximation).

    Values with fewer than FEW occurrences are counted as a single value.
    """
    counts, others = Counter(one), Counter(other)
    seldom = {value for value in {*counts, *others} if counts[value] + others[value] < FEW}
    pairs = [(counts[value], others[value]) for value in sorted({*counts, *others} - seldom)]
    if seldom:
        pairs.append((sum(counts[value] for value in seldom), sum(others[value] for value in seldom)))
    total = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    free = len(pairs) - 1
    return total, free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3 if free else 0.0


@pytest.mark.parametrize("spec", ["eagle3", "suffix"])
def test_counts_of_tokens_are_alike(spec):
    plain, steps = sampled("none", 0)
    drafted, fewer = sampled(spec, 10_000)
    assert fewer < steps
    for place in range(NUM_TOKENS):
        found, limit = chi_square([each[place] for each in plain], [each[place] for each in drafted])
        assert found <= limit or limit == 0, place
    middle = {each[NUM_TOKENS // 2] for each in plain}
    assert len(middle) > 3, "the model generates too few different tokens to show a difference"


def test_the_statistic_sees_a_difference():
    one = [n % 5 for n in range(600)]
    found, limit = chi_square(one, [min(n % 6, 4) for n in range(600)])
    assert found > limit

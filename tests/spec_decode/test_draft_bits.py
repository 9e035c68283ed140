"""Tests that drafts do not change the logprobs' bits, with the CPU kernels and bfloat16."""

import pytest

from mmengine.config import EngineConfig
from mmengine.native import library
from mmengine.serve.engine.engine import Engine
from mmengine_shapes import draft_head_path

TEXTS = ("a a a b a a a b a a", "What is 3 plus 4?", "1 2 3 4 1 2 3 4 1 2", "Who are you?", "is is it")


def told(**settings):
    """Return greedy answers, four logprobs at each position, and the number of accepted drafts."""
    config = EngineConfig(max_model_len=256, enable_prefix_caching=False, num_blocks=200, **settings)
    with Engine(dtype="bfloat16", config=config) as engine:
        chats = [[{"role": "user", "content": text}] for text in TEXTS]
        for _ in range(2):  # the second run proposes the first run's tokens
            answers = engine.generate(chats, max_tokens=90, logprobs=4, ignore_eos=True)
        accepted = sum(counts.accepted for counts in engine.stats().drafts.values())
    return [(answer.token_ids, answer.choices[0].logprobs) for answer in answers], accepted


@pytest.mark.skipif(library.load() is None, reason="torch's attention does not guarantee equal bits")
@pytest.mark.parametrize("spec", ["suffix", f"eagle3={draft_head_path()}"], ids=["suffix", "head"])
def test_drafts_do_not_change_logprob_bits(spec):
    plain, _ = told(spec="none")
    drafted, accepted = told(spec=spec, draft_policy="all")
    assert accepted > 50
    assert drafted == plain

"""Tests block groups with transformers' checkpoints: equal tokens with fewer KV blocks."""

import pytest

from mmengine import Engine
from mmengine.block_groups import BlockGroup
from mmengine.runtime.startup import sizing
from tests.any_model.catalogue import write

PROMPTS = ["the quick brown fox " * 5, "a b c d e f", "the quick brown fox " * 4 + "sleeps"]


def answers(folder):
    """Return the engine's settings, its answers, and the peak KV bytes in use."""
    settings = {"max_model_len": 160, "token_budget": 16, "max_num_seqs": 4, "block_size": 4}
    engine = Engine(str(folder), dtype="float32", **settings)
    built = engine.built
    state, most = built.core.state, 0
    step = built.core.step

    def counted():
        nonlocal most
        outputs = step()
        most = max(most, state.blocks.num_blocks - 1 - state.blocks.num_free)
        return outputs

    built.core.step = counted
    found = [each.token_ids for each in engine.generate(PROMPTS, max_tokens=50, temperature=0)]
    block_bytes = built.kv_bytes // engine.config.num_blocks
    config = engine.config
    engine.close()
    return config, found, most * block_bytes


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_windows_give_equal_tokens_with_less_kv(kind, tmp_path, monkeypatch):
    folder = tmp_path / kind
    write(kind, folder)
    config, found, most_bytes = answers(folder)
    full, *windows = config.block_groups
    assert full.window == 0 and {group.window for group in windows} == {12}
    assert full == BlockGroup(0, full.layers) and len(full.layers) == 2
    monkeypatch.setattr(sizing, "block_groups", lambda spec, longest: ())
    config, wanted, most_bytes_before = answers(folder)
    assert not config.block_groups
    assert found == wanted
    assert most_bytes < 0.85 * most_bytes_before

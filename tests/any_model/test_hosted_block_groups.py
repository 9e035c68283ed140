"""Tests block groups with transformers' checkpoints: equal tokens with fewer KV blocks."""

import pytest

from mmengine import Engine
from mmengine.block_groups import BlockGroup
from mmengine.runtime.startup import sizing
from tests.any_model.catalogue import write

PROMPTS = ["the quick brown fox " * 5, "a b c d e f", "the quick brown fox " * 4 + "sleeps"]


def answers(folder, **changes):
    """Return the engine's settings, its answers, and the peak KV bytes in use."""
    settings = {"max_model_len": 160, "token_budget": 16, "max_num_seqs": 4, "block_size": 4}
    settings["model_impl"] = "transformers"
    engine = Engine(str(folder), dtype="float32", **(settings | changes))
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


def test_with_windows_in_all_layers_the_kv_does_not_grow_with_the_length(tmp_path, monkeypatch):
    """Run a model like Mistral 7B v0.1, and compare with a run that keeps the blocks for all tokens."""
    folder = tmp_path / "mistral"
    write("mistral", folder)
    config, found, most_bytes = answers(folder, max_num_seqs=1)
    assert config.block_groups == (BlockGroup(12, (0, 1, 2, 3)),)
    # The longest request has 149 tokens, which are 38 blocks of 4 tokens. A chunk of 16 tokens also needs the
    # 11 tokens before the chunk. These 27 tokens are in up to 8 blocks, because a block's last token can be
    # the first of them.
    block_bytes = 4 * 4 * 2 * 2 * 16 * 4
    assert most_bytes <= config.most_blocks(160) * block_bytes == 8 * block_bytes
    assert found == answers(folder)[1] == answers(folder, spec="suffix", num_draft_tokens=6)[1]
    monkeypatch.setattr(sizing, "block_groups", lambda spec, longest: ())
    config, wanted, most_bytes_before = answers(folder, max_num_seqs=1)
    assert not config.block_groups and found == wanted
    assert most_bytes < 0.3 * most_bytes_before

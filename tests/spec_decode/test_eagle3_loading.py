"""Tests the settings that are read from draft heads, in each family's file format."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from safetensors.torch import save_file

from mmengine.errors import ConfigError
from mmengine.spec_decode.eagle3.config import Target
from mmengine.spec_decode.eagle3.loading import open_head
from mmengine.spec_decode.eagle3.tensors import canonical_name
from tests.spec_decode.eagle3_heads import DEFAULT_AUX_LAYERS, DRAFT_VOCAB, FAMILIES, TARGET, edited

FIELD = "eagle_aux_hidden_state_layer_ids"
FACTS = {
    "specforge": {"rope.sections": (2, 3, 3), "rope.interleaved": False, "num_drafts": 4},
    "angelslim": {"rope.sections": (4, 2, 2), "rope.interleaved": True, "rope.theta": 5e6},
    "speculators": {
        "family": "speculators",
        "own_embedding": True,
        "fc_norm": True,
        "norm_before_residual": True,
        "norm_output": True,
        "aux_layers": (1, 5, 12),
        "num_drafts": 3,
        "rope.theta": 2e4,
    },
    "modelopt": {
        "head": "target",
        "draft_vocab_size": TARGET.vocab_size,
        "norm_before_fc": True,
        "rope.kind": "llama3",
        "rope.original_positions": 64,
    },
    "qwen3": {
        "hidden_size": 32,
        "qk_norm": True,
        "attention_bias": True,
        "rope.kind": "linear",
        "rope.factor": 2.0,
    },
    "deep": {"num_layers": 2, "draft_vocab_size": TARGET.vocab_size},
}
COMMON = {
    "hidden_size": 48,
    "target_hidden_size": 48,
    "embed_size": 48,
    "intermediate_size": 80,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "draft_vocab_size": DRAFT_VOCAB,
    "aux_layers": DEFAULT_AUX_LAYERS,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_before_residual": False,
    "norm_output": False,
    "qk_norm": False,
    "attention_bias": False,
    "own_embedding": False,
    "head": "own",
}


def fact(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_each_family_is_read(family, tmp_path):
    config = open_head(FAMILIES[family]().save(tmp_path), TARGET).config
    for name, wanted in (COMMON | FACTS[family]).items():
        assert fact(config, name) == wanted, name


@pytest.mark.parametrize("family, bare", [("specforge", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_a_file_that_names_the_layer_alone(family, bare, tmp_path):
    # `bare` is a language model's architecture, which names the type of the head's decoder layer.
    named = open_head(FAMILIES[family]().save(tmp_path / "named"), TARGET).config
    found = open_head(edited(family, architectures=[bare]).save(tmp_path / "bare"), TARGET).config
    assert found == replace(named, family=bare)


def test_shards_behind_an_index_are_read(tmp_path):
    written = FAMILIES["specforge"]()
    whole = open_head(written.save(tmp_path / "whole"), TARGET)
    folder = written.save(tmp_path / "shards")
    (folder / "model.safetensors").unlink()
    names = sorted(written.tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: written.tensors[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = open_head(folder, TARGET)
    assert found.config == whole.config and found.entries.keys() == whole.entries.keys()
    assert (found.target_ids == whole.target_ids).all()


@pytest.mark.parametrize(
    "stored, canonical",
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("aux_norm_low.weight", "fc_norm.0.weight"),
        ("model.aux_norm_mid.weight", "fc_norm.1.weight"),
        ("aux_norm_high.weight", "fc_norm.2.weight"),
        ("model.fc.weight", "fc.weight"),
        ("d2t", "d2t"),
        ("d2t.weight", "d2t"),
        ("midlayer.self_attn.rotary_emb.inv_freq", None),
        ("rotary_emb.inv_freq", None),
        ("verifier_lm_head.weight", None),
    ],
)
def test_names_of_tensors(stored, canonical):
    assert canonical_name(stored) == canonical


# Columns: layer ids at the config's top level and in eagle_config, the target's number of layers, the
# expected layers.
@pytest.mark.parametrize(
    "top, nested, num_layers, aux_hidden_states",
    [
        (None, None, 12, (2, 6, 9)),  # EAGLE's default
        (None, None, 28, (2, 14, 25)),
        (None, None, 7, (2, 3, 4)),
        ([], {}, 12, (2, 6, 9)),  # present but empty
        (None, {FIELD: None}, 12, (2, 6, 9)),
        ([2, 6, 9], None, 12, (2, 6, 9)),  # ids for layer inputs (vLLM, speculators)
        ([1, 5, 8], None, 12, (1, 5, 8)),
        ([2, 4, 6], None, 6, (2, 4, 6)),  # id 6 selects the final norm's input
        (None, {FIELD: [1, 5, 8]}, 12, (2, 6, 9)),  # ids for layer outputs
        (None, {FIELD: [1, 13, 24]}, 28, (2, 14, 25)),
        (None, {FIELD: [2, 6, 9]}, 12, (2, 6, 9)),
        (None, {FIELD: [3, 17, 32]}, 36, (3, 17, 32)),
        ([3, 5, 7], {FIELD: [1, 5, 8]}, 12, (3, 5, 7)),  # the top level takes precedence
    ],
)
def test_auxiliary_layers_of_each_file(top, nested, num_layers, aux_hidden_states, tmp_path):
    written = FAMILIES["specforge"]()
    if top is not None:
        written.config[FIELD] = top
    if nested is not None:
        written.config["eagle_config"] = nested
    target = Target(TARGET.hidden_size, TARGET.vocab_size, num_layers)
    assert open_head(written.save(tmp_path), target).config.aux_layers == aux_hidden_states
    assert open_head(tmp_path, target, aux_layers=[0, 1, 2]).config.aux_layers == (0, 1, 2)


@pytest.mark.parametrize("asked, found", [(None, 3), (0, 0), (7, 7)])
def test_how_many_drafts(asked, found, tmp_path):
    # A requested number takes precedence over the number in the head's config.
    folder = FAMILIES["speculators"]().save(tmp_path)
    assert open_head(folder, TARGET, num_drafts=asked).config.num_drafts == found


@pytest.mark.parametrize("asked", [8, -1, True, 2.0, "4"])
def test_drafts_beyond_the_limit(asked, tmp_path):
    folder = FAMILIES["speculators"]().save(tmp_path)
    with pytest.raises(ConfigError, match="num_drafts is .* 0 to 7"):
        open_head(folder, TARGET, num_drafts=asked)


def test_a_proposal_beyond_the_limit_is_cut(tmp_path):
    # The head's config asks for 12 drafts; the limit is 7.
    written = edited("speculators", speculators_config__proposal_methods=[{"speculative_tokens": 12}])
    assert open_head(written.save(tmp_path), TARGET).config.num_drafts == 7


def test_reading_a_head_needs_no_torch(tmp_path):
    folder = FAMILIES["specforge"]().save(tmp_path)
    code = (
        "import sys; from pathlib import Path; from mmengine.spec_decode.eagle3.loading import open_head\n"
        "from mmengine.spec_decode.eagle3.config import Target\n"
        f"open_head(Path({str(folder)!r}), Target(48, 96, 12)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

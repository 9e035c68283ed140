"""Tests how config.json is read for Qwen3.5: each field that transformers reads is read, missing fields have
defaults, and unsupported configs are refused.
"""

import json

import pytest

from mmengine.errors import ConfigError, ModelError
from mmengine.models.decoder.config import DeltaConfig, ExpertsConfig
from mmengine.models.registry import plugin_for
from mmengine.models.sharding import Shard
from mmengine_qwen3_5 import config, plugin
from mmengine_qwen3_5.config import read_config
from mmengine_qwen3_5.names import NAMES
from tests.models.config_fields import Noted, ignored
from tests.qwen3_5.tiny import MIXTURE, TEXT, VISION

VOCABULARY = {"vocab_size": 96}
# Fields of the vision tower.
TOWER = {*VISION, "in_channels", "patch_size", "spatial_merge_size", "temporal_patch_size"}


def written(folder, kind="Qwen3_5", *, whole=False, **fields):
    """Let transformers write a config.json, and return its path."""
    import transformers

    sizes = (MIXTURE if "Moe" in kind else TEXT) | VOCABULARY | fields
    if whole:
        made = getattr(transformers, f"{kind}Config")(text_config=sizes, vision_config=VISION)
    else:
        made = getattr(transformers, f"{kind}TextConfig")(**sizes)
    made.architectures = [f"{kind}For{'ConditionalGeneration' if whole else 'CausalLM'}"]
    made.save_pretrained(folder)
    return folder / "config.json"


def changed(path, **fields):
    """Change fields in the config.json at `path`, and return its folder. `text_config__x` names the field x
    in text_config. None removes a field.
    """
    values = json.loads(path.read_text())
    for name, value in fields.items():
        *parents, last = name.split("__")
        inner = values
        for parent in parents:
            inner = inner[parent]
        inner.pop(last, None)
        if value is not None:
            inner[last] = value
    path.write_text(json.dumps(values))
    return path.parent


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_no_field_is_ignored_that_transformers_reads(tmp_path, monkeypatch, kind, whole):
    written(tmp_path, kind, whole=whole)
    assert plugin_for(tmp_path) is plugin
    asked = set()
    read = config.read_model_json
    monkeypatch.setattr(config, "read_model_json", lambda *where: Noted(read(*where), asked))
    found = read_config(tmp_path)
    assert (found.vision is not None) is whole and (found.text.experts is not None) is ("Moe" in kind)
    assert not ignored(kind.lower().replace("moe", "_moe"), asked) - (set() if whole else TOWER)


def test_fields_of_a_mixture(tmp_path):
    """All layers have experts, even if mlp_only_layers or decoder_sparse_step name dense layers."""
    folder = changed(written(tmp_path, "Qwen3_5Moe"), mlp_only_layers=[1], decoder_sparse_step=2)
    text = read_config(folder).text
    assert text.experts == ExpertsConfig(8, 3, 32, (0, 1, 2, 3), norm_top_k=True, shared_size=40)
    assert text.intermediate_size == 0 and text.gated and text.norm_offset and text.rotary_dim == 16
    assert text.delta == DeltaConfig(frozenset((0, 1, 3)), 2, 4, 16, 16, 4)


def test_missing_fields_have_transformers_defaults(tmp_path):
    names = ("layer_types", "rope_parameters", "head_dim", "linear_num_key_heads", "linear_num_value_heads")
    names += ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    folder = changed(written(tmp_path), num_hidden_layers=5, **dict.fromkeys(names))
    text = read_config(folder).text
    assert text.delta == DeltaConfig(frozenset((0, 1, 2, 4)), 16, 32, 128, 128, 4)
    assert (text.head_dim, text.rotary_dim, text.rope.theta) == (256, 64, 10000)
    assert text.rope.sections == (11, 11, 10)


@pytest.mark.parametrize(
    "kind, fields, words",
    [
        ("Qwen3_5", {"architectures": ["Qwen3NextForCausalLM"]}, r"architectures is \['Qwen3Next"),
        ("Qwen3_5", {"attention_bias": True}, "attention_bias is true, which is not supported with gated"),
        ("Qwen3_5", {"layer_types": ["linear_attention"] * 4}, "layer_types has no full_attention"),
        ("Qwen3_5", {"layer_types": ["full_attention"]}, "layer_types must name"),
        ("Qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 are not shared evenly"),
        ("Qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be an integer"),
        (
            "Qwen3_5",
            {"rope_parameters__partial_rotary_factor": 0.01},
            "partial_rotary_factor 0.01 of",
        ),
        ("Qwen3_5", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ("Qwen3_5Moe", {"norm_topk_prob": False}, "norm_topk_prob is false; this family always divides"),
        ("Qwen3_5Moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is"),
        ("Qwen3_5Moe", {"num_experts": None}, "num_local_experts is missing"),
        ("Qwen3_5Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be an integer"),
        ("Qwen3_5Moe", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported: only softmax"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, kind, fields, words):
    folder = changed(written(tmp_path, kind), **fields)
    with pytest.raises(ModelError, match=f"config.json: .*{words}"):
        read_config(folder)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_model_is_not_cut_over_ranks(tmp_path, kind):
    written(tmp_path, kind)
    with pytest.raises(ConfigError, match="recurrent states cannot be cut over ranks; use tensor_parallel 1"):
        plugin.load_model(tmp_path, device="cpu", dtype="float32", shard=Shard(0, 2, None))


@pytest.mark.parametrize(
    "stored, canonical",
    [
        ("model.language_model.layers.0.mlp.experts.gate_up_proj", "text.layers.0.mlp.experts.gate_up_proj"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "text.layers.0.mlp.shared_expert_gate.weight"),
        ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("mtp.layers.0.mlp.experts.0.gate_proj.weight_scale_inv", None),
        ("model.mtp.norm.weight", None),
    ],
)
def test_names_of_the_hub(stored, canonical):
    assert NAMES.canonical(stored) == canonical

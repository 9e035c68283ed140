"""Tests how SmolVLM2's config.json is read: defaults for fields that published files leave out, and
refusals.
"""

import json

import pytest

from mmengine.errors import ModelError
from mmengine.models.vision.tensors import vision_tensors
from mmengine_smolvlm import config, plugin
from mmengine_smolvlm.config import read_config
from tests.models.config_fields import Noted, ignored

PUBLISHED = {  # The 500M model's config, without unused fields.
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "smolvlm",
    "scale_factor": 4,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 15,
        "num_hidden_layers": 32,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "smolvlm_vision",
        "num_attention_heads": 12,
        "patch_size": 16,
    },
}
TWO_BILLION = {"image_size": 384, "patch_size": 14, "num_hidden_layers": 27, "intermediate_size": 4304}


def written(folder, **changed):
    values = json.loads(json.dumps(PUBLISHED))
    for name, value in changed.items():
        inside, _, field = name.rpartition("__")
        (values[inside] if inside else values)[field] = value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_published_file_means_what_it_means_in_transformers(tmp_path):
    from transformers import AutoConfig

    for folder in (written(tmp_path), written(tmp_path, vision_config=TWO_BILLION, scale_factor=3)):
        ours, theirs = read_config(folder), AutoConfig.from_pretrained(folder)
        vision, text = theirs.vision_config, theirs.text_config
        assert (ours.vision.depth, ours.vision.hidden_size) == (vision.num_hidden_layers, vision.hidden_size)
        assert ours.vision.intermediate_size == vision.intermediate_size
        assert (ours.vision.num_heads, ours.vision.norm_eps) == (vision.num_attention_heads, 1e-6)
        assert (ours.text.num_heads, ours.text.head_dim) == (text.num_attention_heads, text.head_dim)
        assert ours.text.rope.theta == text.rope_parameters["rope_theta"]
        assert ours.tile_embeds == (vision.image_size // vision.patch_size // theirs.scale_factor) ** 2


def test_missing_text_sizes_are_transformers_defaults(tmp_path):
    from transformers import LlamaConfig

    text = read_config(written(tmp_path, text_config={"vocab_size": 49280})).text
    theirs = LlamaConfig()
    assert (text.hidden_size, text.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (text.num_kv_heads, text.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (text.intermediate_size, text.max_positions) == (theirs.intermediate_size, 2048)


def test_no_field_is_ignored_that_transformers_reads(tmp_path, monkeypatch):
    # `read_config` asks for each field that transformers' model code reads.
    asked = set()
    read = config.read_model_json
    monkeypatch.setattr(config, "read_model_json", lambda *of: Noted(read(*of), asked))
    read_config(written(tmp_path))
    assert not ignored("smolvlm", asked)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"architectures": ["Idefics3ForConditionalGeneration"]}, "architectures is"),
        ({"text_config__model_type": "mistral"}, "text_config.model_type 'mistral' is not supported"),
        ({"text_config__rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"vision_config__hidden_act": "relu"}, "vision_config.hidden_act 'relu' is not supported"),
        ({"vision_config__image_size": [512, 512]}, r"vision_config.image_size is \[512, 512\]"),
        ({"vision_config__num_channels": 4}, "vision_config.num_channels is 4"),
        ({"vision_config__num_attention_heads": 7}, "hidden_size 768 over 7 heads"),
        ({"scale_factor": 3}, "scale_factor 3 does not divide the 32 patches of a tile's side"),
        ({"image_token_id": 49280}, "image_token_id is 49280"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, changed, words):
    with pytest.raises(ModelError, match=f"config.json: .*{words}"):
        read_config(written(tmp_path, **changed))


def test_names_in_files_lead_to_tensors_of_the_tower(tmp_path):
    wanted = vision_tensors(read_config(written(tmp_path)).vision)
    assert wanted["visual.patch_embed.proj.weight"] == (768, 3, 16, 16)
    stored = {
        "model.vision_model.encoder.layers.11.self_attn.q_proj.weight": "visual.blocks.11.attn.q.weight",
        "vision_model.encoder.layers.0.mlp.fc2.bias": "visual.blocks.0.mlp.linear_fc2.bias",
        "model.vision_model.encoder.layers.3.layer_norm1.bias": "visual.blocks.3.norm1.bias",
        "model.connector.modality_projection.proj.weight": "visual.merger.linear.weight",
        "model.vision_model.post_layernorm.weight": "visual.merger.norm.weight",
    }
    for name, canonical in stored.items():
        assert plugin.names.canonical(name) == canonical and canonical in wanted

"""Tests reading config.json for Llama and similar models: defaults by architecture, and unsupported
configs.
"""

import json

import pytest

from mmengine.errors import ModelError
from mmengine.models.decoder.config import ExpertsConfig
from mmengine.models.registry import plugin_for
from mmengine_llama import config, plugin
from mmengine_llama.config import KINDS, read_config
from tests.llama.tiny import MODELS
from tests.models.config_fields import Noted, ignored
from tests.models.text_reference import SIZES
from tests.processing.test_text_models import NAMES, TEMPLATE, trained


def written(folder, architecture, **fields):
    """Write the config.json that transformers writes for the architecture, and return its path."""
    import transformers

    made = getattr(transformers, f"{architecture}Config")(**SIZES | MODELS[architecture] | fields)
    made.architectures = [f"{architecture}ForCausalLM"]
    made.save_pretrained(folder)
    return folder / "config.json"


def changed(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path.parent


@pytest.mark.parametrize("architecture", MODELS)
def test_each_architecture_has_its_own_biases_and_norms(tmp_path, architecture):
    written(tmp_path, architecture)
    assert plugin_for(tmp_path) is plugin
    text = read_config(tmp_path).text
    assert (text.qkv_bias, text.qk_norm) == (architecture == "Qwen2", architecture.startswith("Qwen3"))
    assert (text.experts is not None) is (architecture == "Qwen3Moe")
    assert not text.out_bias and not text.mlp_bias and text.head_dim == SIZES["head_dim"]


def test_every_architecture_is_tested():
    assert {f"{name}ForCausalLM" for name in MODELS} == set(KINDS)


@pytest.mark.parametrize(
    "fields, layers",
    [
        ({}, (0, 2)),
        ({"mlp_only_layers": []}, (0, 1, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (1,)),
    ],
)
def test_which_layers_have_experts(tmp_path, fields, layers):
    folder = written(tmp_path, "Qwen3Moe", **fields).parent
    text = read_config(folder).text
    assert text.experts == ExpertsConfig(8, 3, 32, layers, norm_top_k=False)
    assert text.intermediate_size == (0 if layers == (0, 1, 2) else SIZES["intermediate_size"])
    assert read_config(changed(folder / "config.json", decoder_sparse_step=4)).text.experts is None


def test_missing_fields_have_transformers_defaults(tmp_path):
    sizes = {**SIZES, "architectures": ["Qwen3ForCausalLM"]}
    del sizes["head_dim"], sizes["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    text = read_config(tmp_path).text
    assert (text.head_dim, text.num_kv_heads, text.rope.theta, text.tied) == (128, 4, 10000, False)
    changed(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    assert read_config(tmp_path).text.head_dim == 12
    for ends, ids in ((None, ()), (2, (2,)), ([3, 4], (3, 4))):
        changed(tmp_path / "config.json", eos_token_id=ends)
        assert read_config(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize("architecture", MODELS)
def test_no_field_is_ignored_that_transformers_reads(tmp_path, monkeypatch, architecture):
    written(tmp_path, architecture)
    asked = set()
    read = config.read_model_json
    monkeypatch.setattr(config, "read_model_json", lambda *of: Noted(read(*of), asked))
    read_config(tmp_path)
    assert not ignored(architecture.lower().replace("moe", "_moe"), asked)


@pytest.mark.parametrize(
    "architecture, fields, words",
    [
        ("Llama", {"architectures": ["SmolLM3ForCausalLM"]}, r"architectures is \['SmolLM3ForCausalLM'\]"),
        ("Llama", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ("Llama", {"auto_map": {"AutoModel": "a.b"}}, "the model's own code, which is never run"),
        ("Llama", {"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not 1"),
        ("Llama", {"eos_token_id": 96}, "eos_token_id is 96; it must be an integer from 0 to 95"),
        ("Llama", {"eos_token_id": "2"}, "eos_token_id must be a list"),
        ("Llama", {"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ("Llama", {"hidden_size": None}, "hidden_size is missing"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64 needs"),
        (
            "Qwen3Moe",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9; it must be an integer from 1 to 8",
        ),
        (
            "Qwen3Moe",
            {"num_local_experts": 30000},
            "num_local_experts is 30000; it must be an integer from 1 to",
        ),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("Qwen3Moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list"),
        ("Qwen3Moe", {"n_group": 4}, "n_group 4 is not supported: only softmax routers are"),
        ("Qwen3Moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("Qwen3", {"layer_types": ["sliding_attention"]}, "layer_types is"),
        ("Mistral", {"sliding_window": 4096}, "sliding_window 4096 needs .*; set model_impl to transformers"),
        ("Mistral", {"sliding_window": 64, "use_sliding_window": False}, "sliding_window 64 needs"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, architecture, fields, words):
    folder = changed(written(tmp_path, architecture), **fields)
    with pytest.raises(ModelError, match=f"config.json: .*{words}"):
        read_config(folder)


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "Mistral"])
def test_a_window_counts_where_transformers_has_one(tmp_path, architecture):
    """A sliding window is ignored where transformers ignores it: in Llama, and in Qwen without
    use_sliding_window.
    """
    import transformers

    path = written(tmp_path, architecture)
    plain = {name: value for name, value in json.loads(path.read_text()).items() if "window" not in name}
    path.write_text(json.dumps(plain))
    wanted = read_config(tmp_path)
    path.write_text(json.dumps(plain | {"sliding_window": 64}))
    assert read_config(tmp_path) == wanted
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert not any(getattr(module, "sliding_window", None) for module in model.modules())


def test_a_mistral_config_without_the_field_has_a_window(tmp_path):
    path = written(tmp_path, "Mistral")
    without = {
        name: value for name, value in json.loads(path.read_text()).items() if name != "sliding_window"
    }
    path.write_text(json.dumps(without))
    with pytest.raises(
        ModelError, match="sliding_window is missing and means 4096, .* set model_impl to transformers"
    ):
        read_config(tmp_path)


def test_end_of_answer_tokens_without_a_generation_config(tmp_path):
    tokenizer = trained()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**NAMES, "chat_template": TEMPLATE}))
    path = written(tmp_path, "Llama", vocab_size=400, eos_token_id=tokenizer.token_to_id("<|end|>"))
    processor = plugin.load_processor(tmp_path)
    assert processor.eos_token_ids == (tokenizer.token_to_id("<|end|>"),) and processor.media is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert plugin.load_processor(tmp_path).eos_token_ids == (1, 2)
    (tmp_path / "generation_config.json").unlink()
    changed(path, eos_token_id=None)
    with pytest.raises(ModelError, match="eos_token_id is None; it must name known token ids"):
        plugin.load_processor(tmp_path)

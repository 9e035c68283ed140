"""Tests that the transformers plugin refuses unsupported models from config.json alone."""

import json

import pytest

from mmengine.errors import ModelError
from mmengine_transformers import plugin
from mmengine_transformers.classes import read_model

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 99}


def folder_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["NewForCausalLM"]}, "has no class; update transformers"),
        (
            {"architectures": ["NewForCausalLM"], "auto_map": {"AutoModel": "code.New"}},
            "its own code, which is never run",
        ),
        ({"architectures": ["json"]}, "has no class"),
        ({**LLAMA, "model_type": "qwen2"}, "model_type 'qwen2' does not belong to LlamaForCausalLM"),
        ({**LLAMA, "model_type": "of_nothing"}, "transformers has no model_type 'of_nothing'"),
        ({**LLAMA, "model_type": 3}, "transformers has no model_type '3'"),
        (
            {**LLAMA, "hidden_size": "wide"},
            "no config that LlamaForCausalLM accepts: .* expected int, got str",
        ),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; the limit is 1,024"),
        ({**LLAMA, "num_labels": 10**9}, "num_labels is 1000000000; the limit is 10,000"),
        ({**LLAMA, "max_position_embeddings": -1}, "max_position_embeddings is -1; it must be at least 1"),
        ({**LLAMA, "n_positions": 10**15}, "n_positions is 1000000000000000; the limit"),
        ({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4' is not supported"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "encoder-decoder"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent layers"),
        (LFM2, "layers conv bypass the attention function"),
        (
            {
                "architectures": ["Lfm2VlForConditionalGeneration"],
                "model_type": "lfm2_vl",
                "text_config": {**LFM2, "architectures": []},
            },
            "layers conv bypass the attention function",
        ),
        ({"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}, "a model of timm"),
        ({"architectures": ["FastVlmForConditionalGeneration"], "model_type": "fast_vlm"}, "a model of timm"),
        ({"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"}, "cross attention"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "no language model head"),
        (
            {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"},
            "masks depend on the kinds of tokens by a rule that mmengine does not know",
        ),
        (
            {"architectures": ["Kosmos2_5ForConditionalGeneration"], "model_type": "kosmos-2.5"},
            "names no token that stands for an image",
        ),
        ({"architectures": ["IdeficsForVisionText2Text"], "model_type": "idefics"}, "cross attention"),
        (
            {
                "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
                "model_type": "gemma4_unified_assistant",
            },
            "drafts tokens for another model",
        ),
        ({"architectures": ["GitForCausalLM"], "model_type": "git"}, "do not call transformers' attention"),
    ],
)
def test_the_reason_is_one_sentence(tmp_path, config, words):
    with pytest.raises(ModelError, match=words) as caught:
        plugin.check(folder_of(tmp_path, config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_chooses_no_implementation(tmp_path, name):
    """Config fields that would make transformers download and run kernels are ignored."""
    config, _ = read_model(folder_of(tmp_path, {**LLAMA, name: "kernels-community/flash-attn"}))
    assert config._attn_implementation is None and config._experts_implementation is None


def test_code_in_a_folder_is_ignored_where_transformers_has_the_class(tmp_path):
    folder = folder_of(tmp_path, {**LLAMA, "auto_map": {"AutoModelForCausalLM": "code.New"}})
    (folder / "code.py").write_text("raise SystemExit")
    plugin.check(folder)

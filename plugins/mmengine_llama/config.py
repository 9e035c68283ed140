"""Reads and checks config.json of Llama, and of text models with the same decoder.

Accepts `rope_scaling` and `rope_theta` (files on the hub), `rope_parameters` (transformers 5), and GGUF
metadata. Missing fields have transformers' defaults, but sizes such as hidden_size are required.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.model_files import model_file, read_model_json
from mmengine.checkpoint.names import TensorNames
from mmengine.models.config import NetworkConfig
from mmengine.models.config_reader import check_served, read_decoder, read_experts

NAMES = TensorNames(((re.compile(r"model\."), "text."),))


@dataclass(frozen=True, slots=True)
class Kind:
    """Describes how an architecture differs from Llama.

    `says_biases`: whether q, k, v and o have biases if the field attention_bias is true. `qkv_bias`: whether
    q, k and v always have biases. `head_dim`, `window`: the defaults for the fields head_dim and
    sliding_window.
    """

    says_biases: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False  # Whether the MLP has biases if the field mlp_bias is true.
    qk_norm: bool = False
    head_dim: int | None = None
    window: int | None = None
    experts: bool = False


KINDS = {
    "LlamaForCausalLM": Kind(says_biases=True, mlp_bias=True),
    "Qwen2ForCausalLM": Kind(qkv_bias=True),
    "Qwen3ForCausalLM": Kind(says_biases=True, qk_norm=True, head_dim=128),
    "MistralForCausalLM": Kind(window=4096),
    "Qwen3MoeForCausalLM": Kind(says_biases=True, qk_norm=True, experts=True),
}


@dataclass(frozen=True, slots=True)
class ModelConfig(NetworkConfig):
    eos_token_ids: tuple[int, ...]  # Used if generation_config.json names no end tokens.


def read_config(model: Path) -> ModelConfig:
    """Return the config in a folder or a GGUF file. Raises ModelError with the file's and the field's
    names.
    """
    root = Fields(read_model_json(model, "config.json"), model_file(model, "config.json"), "")
    check_served(root, tuple(KINDS))
    kind = KINDS[next(name for name in root.values["architectures"] if name in KINDS)]
    if kind.window is not None and "sliding_window" not in root.values:
        root.fail(
            f"sliding_window is missing and means {kind.window}, which only transformers' modules support; "
            "set model_impl to transformers, or sliding_window to null"
        )
    biased = kind.says_biases and root.flag("attention_bias", False)
    text = read_decoder(
        root,
        tied=root.flag("tie_word_embeddings", False),
        head_dim=kind.head_dim,
        qkv_bias=biased or kind.qkv_bias,
        out_bias=biased,
        mlp_bias=kind.mlp_bias and root.flag("mlp_bias", False),
        qk_norm=kind.qk_norm,
        windowed=kind.window is not None,
        experts=read_experts(root, norm_top_k=root.flag("norm_topk_prob", False)) if kind.experts else None,
    )
    return ModelConfig(text, None, _eos_token_ids(root, text.vocab_size))


def _eos_token_ids(root: Fields, vocab_size: int) -> tuple[int, ...]:
    if isinstance(root.values.get("eos_token_id"), int):
        return (root.integer("eos_token_id", 0, vocab_size - 1),)
    return root.integers("eos_token_id", [], 0, vocab_size - 1, 64)

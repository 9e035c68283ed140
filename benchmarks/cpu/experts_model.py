"""Make a random mixture-of-experts model with Qwen3-30B-A3B's shapes and fewer layers.

To save disk space, the file stores the experts of only one layer, and each layer loads a copy. Routers,
attention and norms differ between layers. As in the hub's Qwen3-VL-30B-A3B, the experts are two transposed
tensors: gate and up together, and down.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mmengine.models.loader import resolve_folder

SIZES: dict[str, Any] = {
    "vocab_size": 32768,  # reduced, because lm_head's share of the weights would grow with fewer layers
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 13,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
SMALL = SIZES | {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "moe_intermediate_size": 64,
}
Shapes = dict[str, tuple[int, ...]]


def make(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a model folder: config, weights, and the included checkpoint's tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_folder(None) / name, folder)
    layers = sizes["num_hidden_layers"]
    config = sizes | {"eos_token_id": 0, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (folder / "config.json").write_text(json.dumps(config))
    whole, layer, experts = _shapes(sizes)
    stored: Shapes = {**whole, **{f"shared.{name}": shape for name, shape in experts.items()}}
    for i in range(layers):
        stored |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in stored.items():
        begin, end = end, end + 2 * math.prod(shape)
        entry = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        names = [name]
        if name.startswith("shared."):
            names = [f"model.layers.{i}.{name.removeprefix('shared.')}" for i in range(layers)]
        header |= dict.fromkeys(names, entry)
    with (folder / "model.safetensors").open("wb") as file:
        words = json.dumps(header).encode()
        file.write(len(words).to_bytes(8, "little") + words)
        for seed, (name, shape) in enumerate(stored.items()):
            _write(file, name, shape, seed)


def _write(file: BinaryIO, name: str, shape: tuple[int, ...], seed: int) -> None:
    """Write a random tensor. The scale keeps a layer's output at about the magnitude of its input."""
    random = torch.Generator().manual_seed(seed)
    if "norm" in name:
        values = 1 + 0.3 * torch.randn(shape, generator=random)
        file.write(values.bfloat16().view(torch.uint8).numpy().data)
        return
    inputs = shape[-2] if len(shape) == 3 else 1 if "embed" in name else shape[-1]
    for _ in range(shape[0] if len(shape) == 3 else 1):
        drawn = torch.randn(shape[-2:], generator=random) / inputs**0.5
        file.write(drawn.bfloat16().view(torch.uint8).numpy().data)


def _shapes(s: dict[str, Any]) -> tuple[Shapes, Shapes, Shapes]:
    """Return three dicts of tensor name -> shape: embedding, head and final norm; a layer without experts;
    and a layer's experts.
    """
    hidden, size, count, head = s["hidden_size"], s["moe_intermediate_size"], s["num_experts"], s["head_dim"]
    q, kv = head * s["num_attention_heads"], head * s["num_key_value_heads"]
    whole: Shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (s["vocab_size"], hidden))
    whole["model.norm.weight"] = (hidden,)
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate.weight": (count, hidden),
    }
    experts: Shapes = {
        "mlp.experts.gate_up_proj": (count, hidden, 2 * size),
        "mlp.experts.down_proj": (count, size, hidden),
    }
    return whole, layer, experts

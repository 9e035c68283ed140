"""Write random LoRA adapters in PEFT's format, without using PEFT."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Sizes = dict[str, Any]  # a checkpoint's text_config


def modules(text: Sizes) -> Iterator[tuple[str, int, int]]:
    """Yield name, output size and input size of each linear layer in a decoder layer."""
    hidden, wide, head = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    yield from (("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden))
    yield from (("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, q))
    yield from (("mlp.gate_proj", wide, hidden), ("mlp.up_proj", wide, hidden))
    yield "mlp.down_proj", hidden, wide


def num_bytes(text: Sizes, rank: int) -> int:
    """Return the size in bytes of a bfloat16 adapter on all linear layers."""
    return 2 * rank * text["num_hidden_layers"] * sum(out + inputs for _, out, inputs in modules(text))


def write_adapter(folder: Path, text: Sizes, rank: int, seed: int) -> Path:
    """Write a random adapter with small weights, and return `folder`."""
    folder.mkdir()
    source, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(text["num_hidden_layers"]):
        for name, out, inputs in modules(text):
            key = f"base_model.model.model.language_model.layers.{layer}.{name}"
            for which, shape in (("A", (rank, inputs)), ("B", (out, rank))):
                drawn = torch.randn(shape, generator=source) / shape[1] ** 0.5 / 4
                tensors[f"{key}.lora_{which}.weight"] = drawn.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

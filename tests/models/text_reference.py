"""Makes random text models for tests of the text decoder: checkpoints, transformers' models and
NetworkConfigs. No plugin is involved.
"""

import json
import re
from typing import NamedTuple

import numpy as np
import torch

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.names import TensorNames
from mmengine.models.config import NetworkConfig
from mmengine.models.config_reader import read_decoder
from mmengine.models.network import Network

NAMES = TensorNames(((re.compile(r"model\."), "text."),))
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
# The rotary wavelengths are 6, 20, 63, 199 and more tokens. The first frequency stays, the second is
# interpolated, and the others are divided by the factor.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Kind(NamedTuple):
    """A kind of model. `architecture`: transformers' name. `sizes`: overrides SIZES."""

    architecture: str = "Llama"
    sizes: dict = {}


KINDS = {
    "plain": Kind(),
    "tied": Kind(sizes={"tie_word_embeddings": True}),
    "llama3": Kind(sizes={"rope_parameters": LLAMA3}),
    "linear": Kind(sizes={"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "all biases": Kind(sizes={"attention_bias": True, "mlp_bias": True}),
    "biases of attention": Kind(sizes={"attention_bias": True}),
    "biases of q, k and v": Kind("Qwen2"),
    "norms of q and k": Kind("Qwen3"),
    "norms of q and k, biases": Kind("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "odd sizes, one key-value head": Kind(
        sizes={
            "hidden_size": 40,
            "intermediate_size": 72,
            "head_dim": 24,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "mlp_bias": True,
        }
    ),
}


def make_reference(folder, kind=KINDS["plain"], seed=0):
    """Write a random checkpoint to `folder`, and return its transformers model in float32.

    Every parameter is random. In transformers' new models, all norms are equal and all biases are 0, which
    would hide swapped tensors. The scales are chosen so that greedy answers vary.
    """
    import transformers

    config = getattr(transformers, f"{kind.architecture}Config")(**SIZES | kind.sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind.architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
                if "q_norm" in name or "k_norm" in name:
                    weight.mul_(2)
            elif name.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
            elif "embed_tokens" in name:
                # Small, because a tied embedding scales the logits.
                weight.copy_(0.25 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)
    return model


def described(folder):
    """Return the NetworkConfig for a folder from `make_reference`."""
    path = folder / "config.json"
    return describe(Fields(json.loads(path.read_text()), path, ""))


def describe(fields):
    kind, biased = fields.values["model_type"], fields.flag("attention_bias", False)
    text = read_decoder(
        fields,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=kind == "qwen3",
    )
    return NetworkConfig(text, None)


def make_prompts(seed, lengths=(17, 1, 70, 33)):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, SIZES["vocab_size"], length)) for length in lengths]


def reference_logits(model, ids):
    with torch.inference_mode():
        return model(ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0].float()


def run_prompts(model: Network, prompts, steps, attention):
    """Return each prompt's logits [n, vocab]. `steps`: (row, number of tokens) pairs for each step."""
    done = [0] * len(prompts)
    logits = [[] for _ in prompts]
    for rows in steps:
        attention.begin(rows)
        ids = torch.cat([prompts[row][done[row] :][:count] for row, count in rows])
        places = torch.cat([torch.arange(done[row], done[row] + count) for row, count in rows])
        with torch.inference_mode():
            hidden = model.forward(model.embed(ids), None, places.expand(3, -1), attention)
            found = model.logits(hidden).split([count for _, count in rows])
        for (row, count), part in zip(rows, found, strict=True):
            logits[row].append(part)
            done[row] += count
    return [torch.cat(parts) for parts in logits]

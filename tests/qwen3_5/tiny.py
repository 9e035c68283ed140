"""Creates tiny random Qwen3.5 checkpoints, and returns them as transformers' models."""

import json
import shutil

import torch

from mmengine.testing.contract import make_lively
from mmengine_shapes import checkpoint_path

WORDS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
MIXTURE = {name: size for name, size in TEXT.items() if name != "intermediate_size"} | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
}


def lively(model):
    """Set random weights that generate varied tokens, and return the model.

    Subtracts 1 from norm weights to which the model adds 1. The decays (A_log) let a recurrent state keep
    some values and forget others.
    """
    make_lively(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "visual" not in name and name.endswith("norm.weight") and "linear_attn" not in name:
                weight.sub_(1)
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-3, 1, len(weight)))
    return model


def make_text(folder, *, mixture=False, **fields):
    import transformers

    kind, sizes = ("Qwen3_5Moe", MIXTURE) if mixture else ("Qwen3_5", TEXT)
    config = getattr(transformers, f"{kind}TextConfig")(**sizes | _words() | fields)
    return _saved(folder, getattr(transformers, f"{kind}ForCausalLM")(config))


def make_whole(folder, *, mixture=False, **fields):
    """Write a checkpoint with text model and vision tower, and return it as transformers' model. `fields`:
    config fields of the text model.
    """
    import transformers

    kind, sizes = ("Qwen3_5Moe", MIXTURE) if mixture else ("Qwen3_5", TEXT)
    words = json.loads((checkpoint_path() / "config.json").read_text())
    text = sizes | _words() | fields
    vision = {"patch_size": words["vision_config"]["patch_size"], "out_hidden_size": text["hidden_size"]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=VISION | vision,
        **{name: words[name] for name in words if name.endswith("token_id")},
    )
    return _saved(folder, getattr(transformers, f"{kind}ForConditionalGeneration")(config))


def _words():
    words = json.loads((checkpoint_path() / "config.json").read_text())
    return {"vocab_size": words["text_config"]["vocab_size"]}


def _saved(folder, model):
    for name in WORDS:
        shutil.copy(checkpoint_path() / name, folder)
    lively(model.eval()).save_pretrained(folder)
    return model

"""Makes a tiny vision-language model and PEFT adapters for it, and computes transformers' answers with each
adapter.
"""

import torch
from peft import LoraConfig, get_peft_model

from tests.models.test_contract_qwen3_vl import TestQwen3VL as Contract
from tests.pictures import asked, noise

NUM_NEW = 12
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LANGUAGE, TOWER = r".*language_model.*\.", r".*visual\."
CHATS = [
    asked("What is the time?"),
    asked(noise(0, (64, 96)), "What is in it?"),
    asked("Two cats sat on a mat, and one of them slept."),
    asked(noise(1, (64, 64)), "Of which colour is it?"),
]
# Eight adapters with different ranks, scales and modules. Two of them change the vision tower.
KINDS = {
    "attention": {"r": 8, "target_modules": LANGUAGE + "(q|k|v|o)_proj"},
    "queries": {"r": 3, "lora_alpha": 9, "target_modules": LANGUAGE + "q_proj"},
    "mlp": {"r": 16, "lora_alpha": 16, "target_modules": LANGUAGE + "(gate|up|down)_proj"},
    "up": {"r": 5, "use_rslora": True, "lora_alpha": 4, "target_modules": LANGUAGE + "up_proj"},
    "whole": {"r": 20, "target_modules": LANGUAGE + "(q|k|v|o|gate|up|down)_proj"},
    "patterns": {
        "r": 4,
        "rank_pattern": {"v_proj": 6},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 12},
        "target_modules": LANGUAGE + "(q|v)_proj",
    },
    "tower": {"r": 4, "target_modules": TOWER + r".*(qkv|attn\.proj|linear_fc1|linear_fc2)"},
    "both": {"r": 8, "target_modules": r".*(q_proj|down_proj|visual.*qkv)"},
}


def make_model(folder):
    """Write the model to `folder`, and return it as a transformers model in float32."""
    return Contract().make_checkpoint(folder)


def make_adapter(model, folder, seed=0, **kind):
    """Write an adapter to `folder` and return the adapted model. The adapted model's method `unload` returns
    `model` without the adapter.
    """
    config = LoraConfig(**{"lora_alpha": 16, "lora_dropout": 0.0, **kind})
    adapted = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(weight.shape, generator=generator)
                weight.copy_(drawn / weight.shape[1] ** 0.5 * (0.7 if "lora_B" in name else 1))
    adapted.save_pretrained(folder)
    return adapted


def answers_of(model, folder):
    """Return the tokens that the model generates greedily for each of CHATS."""
    found = []
    for each in CHATS:
        inputs = Contract().inputs(folder, each)
        with torch.inference_mode():
            out = model.generate(
                **inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        found.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return found


def make_all(folder):
    """Write the model and all adapters. Return the model's folder, the adapters' folders by name, and
    transformers' tokens by adapter name ("" for no adapter).
    """
    model_folder = folder / "model"
    model_folder.mkdir()
    model = make_model(model_folder)
    wanted, folders = {"": answers_of(model, model_folder)}, {}
    for seed, (name, kind) in enumerate(KINDS.items()):
        folders[name] = folder / name
        adapted = make_adapter(model, folders[name], seed, **kind)
        wanted[name] = answers_of(adapted, model_folder)
        model = adapted.unload()
    return model_folder, folders, wanted

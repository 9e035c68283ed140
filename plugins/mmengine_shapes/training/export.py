"""Writes a checkpoint folder in hub layout: weights in bf16, configuration, tokenizer, processors.

python -m mmengine_shapes.training.export WEIGHTS.pt FOLDER
"""

import argparse
import json
import pathlib

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3VLForConditionalGeneration

from mmengine_shapes.training.model import make_model, write_processors
from mmengine_shapes.training.tokenizer import write_tokenizer


def special_ids(folder: pathlib.Path) -> dict[str, int]:
    """Return the tokenizer's vocabulary: text -> id."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)


def write_config(model: Qwen3VLForConditionalGeneration, ids: dict[str, int], folder: pathlib.Path) -> None:
    """Write config.json and generation_config.json."""
    config = model.config.to_dict()
    config["architectures"] = ["Qwen3VLForConditionalGeneration"]
    # The sub-configs have the dtype in which the model was built, not the file's dtype.
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def export(model: Qwen3VLForConditionalGeneration, folder: pathlib.Path) -> None:
    """Write the model into `folder`. An existing tokenizer is not overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder)
    write_processors(folder)
    write_config(model, special_ids(folder), folder)
    # The LM head is left out, because it is tied to the embedding.
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    """Export the weights of a training run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "tokenizer.json").exists():
        write_tokenizer(options.folder)
    model = make_model(special_ids(options.folder))
    model.load_state_dict(torch.load(options.weights, weights_only=True)["model"])
    export(model, options.folder)


if __name__ == "__main__":
    main()

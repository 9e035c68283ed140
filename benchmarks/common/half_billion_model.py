"""A Qwen3-VL with half a billion random weights in bfloat16, made once into a cache folder.

Text: 20 layers, hidden size 1024, 16 query heads, 8 KV heads, head size 128, intermediate size 3072,
vocabulary size 65,536, tied head, 381.7 M weights. Vision: 12 layers, hidden size 768. Tokenizer and
processor come from the included checkpoint. With ordinary random weights the model would repeat one token
forever, and a comparison of tokens would detect no error. Therefore the embedding is small compared with the
layers' outputs. The norm weights for q and k are about 1: with weights of about 2, these outputs would be
larger still, but rounding to bfloat16 alone would change two tokens in three.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from mmengine.models.loader import resolve_folder
from mmengine.strict_modes import BadModes, open_strict

if TYPE_CHECKING:  # the import takes seconds
    from transformers import PreTrainedConfig, PreTrainedModel

RECIPE = 2  # Part of the folder's name; raise it when the generated model changes.
TEXT = {
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [3, 6, 9],
}
SPECIAL_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def cached_folder() -> Path:
    """Return the model's folder; create the model if the folder is missing."""
    root = os.environ.get("MMENGINE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"half-billion-{RECIPE}"
    folder = Path(root) / "mmengine-benchmarks" / name
    try:
        os.close(open_strict(folder.parent, make=True))
    except BadModes as problem:
        raise SystemExit(f"cannot store weights safely: {problem}, or set MMENGINE_CACHE") from None
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            made = Path(unfinished) / name
            make(made)
            if not folder.is_dir():  # Another process may have created the folder.
                made.rename(folder)
    return folder


def make(folder: Path, text: dict | None = None, vision: dict | None = None) -> None:
    """Write the config, random weights, and the included checkpoint's processor files to `folder`. Tests
    override sizes in the config with `text` and `vision`.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # lazy: takes seconds

    embedded = resolve_folder(None)
    shutil.copytree(embedded, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    ids = {name: json.loads((embedded / "config.json").read_text())[name] for name in SPECIAL_IDS}
    config = Qwen3VLConfig(
        text_config=TEXT | (text or {}),
        vision_config=VISION | (vision or {}),
        tie_word_embeddings=True,
        dtype="bfloat16",
        **ids,
    )
    write_random(folder, Qwen3VLForConditionalGeneration, config)


def write_random(folder: Path, model_class: "type[PreTrainedModel]", config: "PreTrainedConfig") -> None:
    """Write `config` and random bfloat16 weights for a model of `model_class` to `folder`."""
    config.architectures = [model_class.__name__]
    with torch.device("meta"):
        model = model_class(config)
    source = torch.Generator().manual_seed(0)
    weights = {name: _drawn(name, value.shape, source) for name, value in model.named_parameters()}
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _drawn(name: str, shape: torch.Size, source: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=source)
    if name.endswith("bias"):
        value = 0.1 * noise
    elif "norm" in name:
        value = 1 + 0.3 * noise
    elif "embed_tokens" in name:  # Also the head's weights, so this sets the logits' scale.
        value = 0.025 * noise
    else:
        value = noise / noise[0].numel() ** 0.5
    return value.to(torch.bfloat16)


def text_bytes(folder: Path) -> int:
    """Return how many bytes of weights a decode step reads: text layers, norms, and the tied head."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".visual." not in name]  # noqa: SIM118 (no mapping)
        shapes = [file.get_slice(name).get_shape() for name in names]
    return sum(2 * torch.Size(shape).numel() for shape in shapes)

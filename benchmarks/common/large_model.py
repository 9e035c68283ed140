"""Makes a checkpoint with random weights in Qwen3-VL-2B's shape, and random photographs. The checkpoint has
the hub's layout: config, processor files, Qwen's vocabulary and bfloat16 shards.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from mmengine.checkpoint.gguf.container import open_container
from mmengine.checkpoint.gguf.tokenizer import tokenizer_json
from mmengine.models.loader import resolve_folder

SHARD_BYTES = 10**9
# Qwen's special tokens, sorted by id. The first id follows the last text token's id.
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
FOUR_BILLION = {  # The text sizes of Qwen3-VL-4B that differ from TEXT.
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
# Sizes for --quick.
SMALL_TEXT = TEXT | {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
SMALL_VISION = VISION | {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 256,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


def make(
    folder: Path,
    vocabulary: Path | None,
    *,
    small: bool = False,
    layers: int | None = None,
    tower_layers: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Write a checkpoint to `folder`. `sizes`: overrides the 2B model's text sizes.

    `vocabulary`: a GGUF file with Qwen's vocabulary, or None for the included checkpoint's small vocabulary.
    `layers`, `tower_layers`: override the number of layers in the text model and in the vision tower.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # lazy: takes seconds

    ids = make_tokenizer(folder, vocabulary)
    text = (SMALL_TEXT if small else TEXT) | dict(sizes or {})
    text |= {} if layers is None else {"num_hidden_layers": layers}
    vision = (SMALL_VISION if small else VISION) | {"out_hidden_size": text["hidden_size"]}
    if tower_layers is not None:
        taps = [layer for layer in vision["deepstack_visual_indexes"] if layer < tower_layers]
        vision |= {"depth": tower_layers, "deepstack_visual_indexes": taps or [0]}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **ids,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    config.save_pretrained(folder)
    write_weights(folder, model, small)


def make_tokenizer(folder: Path, vocabulary: Path | None) -> dict[str, int]:
    """Write a new folder with the processor files, and return the ids of the media tokens.

    `vocabulary`: see `make`.
    """
    embedded = resolve_folder(None)
    shutil.copytree(embedded, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    ids = {name: json.loads((embedded / "config.json").read_text())[name] for name in IDS}
    if vocabulary is not None:
        ids = _write_vocabulary(folder, vocabulary)
    for name, least, most in (("", 2**16, 2**24), ("video_", 2**12, 25_165_824)):
        _change(
            folder / f"{name}preprocessor_config.json", size={"shortest_edge": least, "longest_edge": most}
        )
    return ids


def write_weights(folder: Path, model: torch.nn.Module, small: bool) -> None:
    """Write shards with a random tensor for each parameter of `model`."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    _write_shards(folder, shapes, 10**6 if small else SHARD_BYTES)


def _write_vocabulary(folder: Path, vocabulary: Path) -> dict[str, int]:
    tokenizer: dict[str, Any] = tokenizer_json(open_container(vocabulary))
    first = len(tokenizer["model"]["vocab"])
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] = [
        like | {"id": first + place, "content": token} for place, token in enumerate(SPECIAL)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    end = [first + SPECIAL.index(token) for token in ("<|im_end|>", "<|endoftext|>")]
    _change(folder / "generation_config.json", eos_token_id=end, pad_token_id=end[1])
    return {name: first + SPECIAL.index(token) for name, token in IDS.items()}


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _write_shards(folder: Path, shapes: dict[str, torch.Size], most: int) -> None:
    """Write the shards and the index file. As on the hub, the tensors are sorted by name."""
    shards: list[list[str]] = [[]]
    room = most
    for name in sorted(shapes):
        size = 2 * shapes[name].numel()
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    source, weight_map = torch.Generator().manual_seed(0), {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(
            {name: _drawn(name, shapes[name], source) for name in names}, folder / file, {"format": "pt"}
        )
        weight_map |= dict.fromkeys(names, file)
    total = sum(2 * shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _drawn(name: str, shape: torch.Size, source: torch.Generator) -> torch.Tensor:
    value = torch.empty(shape, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return value.normal_(0, 0.1, generator=source)
    if "norm" in name:
        return value.normal_(1, 0.1, generator=source)
    return value.normal_(0, 0.025 if "embed" in name else value[0].numel() ** -0.5, generator=source)


def photograph(path: Path, width: int, height: int) -> Path:
    """Write a JPEG with smooth colours and some noise, and return its path."""
    chance = np.random.default_rng(width)
    coarse = Image.fromarray(chance.integers(0, 256, (12, 16, 3), np.uint8), "RGB")
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += chance.integers(-8, 9, pixels.shape, np.int16)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8), "RGB").save(path, quality=90)
    return path

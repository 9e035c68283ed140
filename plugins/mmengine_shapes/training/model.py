"""Makes the untrained model: its configuration, random weights, and processor settings."""

import json
import pathlib

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

VOCAB_SIZE = 1536
INIT_STD = 0.04
PIXELS = (96 * 96, 256 * 256)  # Images with 9 to 64 merged tokens are not resized.
CLIP_PIXELS = (4 * 64 * 64, 8 * 128 * 128)


def make_config(ids: dict[str, int]) -> Qwen3VLConfig:
    """Return the configuration. `ids`: special token -> id."""
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "initializer_range": INIT_STD,
    }
    vision = {
        "depth": 4,
        "hidden_size": 96,
        "num_heads": 4,
        "intermediate_size": 288,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
        "out_hidden_size": 128,
        "initializer_range": INIT_STD,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def make_model(ids: dict[str, int], seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """Return a model with random weights, in fp32."""
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(make_config(ids)).float()


def write_processors(folder: pathlib.Path) -> None:
    """Write the image and video processors' settings into `folder`."""
    common = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "processor_class": "Qwen3VLProcessor",
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": _edges(PIXELS)}
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": _edges(CLIP_PIXELS),
        "fps": 2,
        "min_frames": 4,
        "max_frames": 8,
        "do_sample_frames": True,
        "cap_pixels_per_frame": False,
    }
    for name, own in (("preprocessor_config.json", image), ("video_preprocessor_config.json", video)):
        (folder / name).write_text(json.dumps({**own, **common}, indent=2) + "\n")


def _edges(pixels: tuple[int, int]) -> dict[str, int]:
    """Return an image's minimum and maximum pixels, under the names in transformers' processors."""
    return {"shortest_edge": pixels[0], "longest_edge": pixels[1]}

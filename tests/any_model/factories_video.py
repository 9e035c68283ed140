"""Factories for architectures that are mostly used with videos. Their processors need torchvision."""

from collections.abc import Callable

import torch

from tests.any_model.factories import BASE, Factory, Ids, Words
from tests.any_model.factories_grid import CLIPS, QWEN, QWEN_IDS, QWEN_TOKENS, TOWER, media, named
from tests.any_model.factories_image import (
    CUT,
    GRID,
    MROPE,
    PINPOINTS,
    SMALL_TILES,
    STRATEGY,
    TILED,
    VISION,
    build,
    llava,
    tiled,
)
from tests.any_model.factories_image import text as text_config

PAIR_TOKENS = {"image_token": "<image>", "video_token": "<video>"}
PAIR = Words(("<image>", "<video>"), PAIR_TOKENS, "<image>", "<video>")


def _qwen3_vl(ids: Ids) -> torch.nn.Module:
    return build(
        "qwen3_vl",
        text_config={**BASE, "head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        vision_config={
            **TOWER,
            "depth": 3,
            "patch_size": 14,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **named(ids, QWEN_IDS, QWEN_TOKENS),
    )


def _video_llama_3(ids: Ids) -> torch.nn.Module:
    return build(
        "video_llama_3",
        text_config=text_config("qwen2"),
        vision_config={**VISION, "patch_size": 14},
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
    )


def _llava_with_videos(kind: str, **fields: object) -> Callable[[Ids], torch.nn.Module]:
    return lambda ids: llava(kind, video_token_index=ids["<video>"], **fields)(ids)


FACTORIES: dict[str, Factory] = {
    "llava_next_video": Factory(
        PAIR,
        _llava_with_videos("llava_next_video", image_grid_pinpoints=PINPOINTS),
        media(
            *("LlavaNextVideoProcessor", "LlavaNextImageProcessor", "LlavaNextVideoVideoProcessor"),
            {**CUT, "image_grid_pinpoints": PINPOINTS},
            CUT,
            **STRATEGY,
        ),
    ),
    "qwen3_vl": Factory(
        QWEN,
        _qwen3_vl,
        media("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", GRID, CLIPS),
    ),
    "smolvlm": Factory(
        Words((*TILED.special, "<|im_start|>"), TILED.attributes, "<image>", "<video>"),
        tiled("smolvlm"),
        media(
            *("SmolVLMProcessor", "SmolVLMImageProcessor", "SmolVLMVideoProcessor", SMALL_TILES),
            {**SMALL_TILES, "fps": 1, "num_frames": 6, "do_sample_frames": True},
            image_seq_len=4,
        ),
    ),
    "video_llama_3": Factory(
        PAIR,
        _video_llama_3,
        media(
            *("VideoLlama3Processor", "VideoLlama3ImageProcessor", "VideoLlama3VideoProcessor"),
            GRID,
            CLIPS,
        ),
    ),
    "video_llava": Factory(
        PAIR,
        _llava_with_videos("video_llava"),
        media(
            *("VideoLlavaProcessor", "VideoLlavaImageProcessor", "VideoLlavaVideoProcessor"),
            CUT,
            CUT,
            patch_size=14,
        ),
    ),
}

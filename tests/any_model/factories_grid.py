"""Factories for image-text architectures with image grids and video processors, which need torchvision."""

from collections.abc import Callable, Mapping

import torch
import transformers

from tests.any_model.factories import BASE, Factory, Ids, Words
from tests.any_model.factories_image import (
    GRID,
    INTERN,
    MROPE,
    SIDE,
    SIGLIP,
    Processor,
    build,
    images,
)
from tests.any_model.factories_image import text as text_config

QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
GLM_TOKENS = (
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
QWEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
GLM_IDS = (
    *("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id"),
    *("video_start_token_id", "video_end_token_id"),
)
QWEN = Words(
    QWEN_TOKENS,
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)
GLM = Words(
    GLM_TOKENS,
    {"image_token": "<|image|>", "video_token": "<|video|>"},
    "<|begin_of_image|><|image|><|end_of_image|>",
    "<|begin_of_video|><|video|><|end_of_video|>",
)
CLIPS = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}, "patch_size": 14}
TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}


def media(
    name: str,
    image_processor: str,
    video_processor: str,
    settings: Mapping[str, object],
    clips: Mapping[str, object],
    **fields: object,
) -> Processor:
    """Return a function that takes a tokenizer and returns a processor for images and videos."""

    def make(tokenizer: object) -> object:
        return getattr(transformers, name)(
            image_processor=images(image_processor, **settings),
            tokenizer=tokenizer,
            video_processor=getattr(transformers, video_processor)(**clips),
            **fields,
        )

    return make


def named(ids: Ids, names: tuple[str, ...], tokens: tuple[str, ...]) -> dict[str, int]:
    """Return config fields: each name with its token's id."""
    return {name: ids[token] for name, token in zip(names, tokens, strict=True)}


def _grid_model(
    kind: str, vision: Mapping[str, object], names: tuple[str, ...], tokens: tuple[str, ...], **sizes: object
) -> Callable[[Ids], torch.nn.Module]:
    return lambda ids: build(
        kind,
        text_config={**BASE, "rope_parameters": MROPE, **sizes},
        vision_config=dict(vision),
        **named(ids, names, tokens),
    )


def _intern(kind: str, text_kind: str) -> Callable[[Ids], torch.nn.Module]:
    return lambda ids: build(
        kind,
        vision_config=INTERN,
        text_config=text_config(text_kind, head_dim=16),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
    )


def _onevision(ids: Ids) -> torch.nn.Module:
    return build(
        "llava_onevision",
        text_config=text_config("qwen2"),
        vision_config={**SIGLIP, "vision_use_head": False},
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=PINPOINTS,
    )


QWEN_PROCESSOR = media(
    "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", GRID, {**CLIPS, "max_frames": 8}
)
GLM_PROCESSOR = media(
    *("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor"),
    {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 16}},
    CLIPS,
)
WHOLE_ROTARY = {**MROPE, "partial_rotary_factor": 1.0}
PINPOINTS = [[56, 56], [56, 112], [112, 56], [112, 112]]
INTERN_WORDS = Words(
    ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "<IMG_CONTEXT>",
    "<video>",
)
TILES = {"size": SIDE, "crop_to_patches": True, "max_patches": 3}
FACTORIES: dict[str, Factory] = {
    "ernie4_5_vl_moe": Factory(
        Words(
            (
                *("<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
                *("<|VIDEO_START|>", "<|VIDEO_END|>"),
            ),
            {
                "image_token": "<|IMAGE_PLACEHOLDER|>",
                "video_token": "<|VIDEO_PLACEHOLDER|>",
                "image_start_token": "<|IMAGE_START|>",
                "image_end_token": "<|IMAGE_END|>",
                "video_start_token": "<|VIDEO_START|>",
                "video_end_token": "<|VIDEO_END|>",
            },
            "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
            "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
        ),
        lambda ids: build(
            "ernie4_5_vl_moe",
            text_config={
                **BASE,
                "moe_intermediate_size": [32, 16],
                "moe_k": 2,
                "moe_num_experts": 4,
                "moe_num_shared_experts": 1,
                "mlp_layer_types": ["dense"] + ["sparse"] * 3,
                "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]},
            },
            vision_config={"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48},
            **named(
                ids,
                GLM_IDS,
                (
                    *("<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
                    *("<|VIDEO_START|>", "<|VIDEO_END|>"),
                ),
            ),
        ),
        media(
            *("Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeImageProcessor", "Ernie4_5_VLMoeVideoProcessor"),
            {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 8}},
            {**CLIPS, "draw_on_frames": False},
        ),
    ),
    "glm46v": Factory(
        GLM,
        _grid_model(
            *("glm46v", {**TOWER, "image_size": 56}, GLM_IDS, GLM_TOKENS), rope_parameters=WHOLE_ROTARY
        ),
        GLM_PROCESSOR,
    ),
    "glm4v": Factory(
        GLM,
        _grid_model(
            *("glm4v", {**TOWER, "image_size": 56}, GLM_IDS, GLM_TOKENS), rope_parameters=WHOLE_ROTARY
        ),
        media(
            *("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
            {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 16}},
            CLIPS,
        ),
    ),
    "glm_ocr": Factory(
        GLM,
        _grid_model("glm_ocr", {**TOWER, "image_size": 56}, GLM_IDS, GLM_TOKENS, head_dim=16),
        GLM_PROCESSOR,
    ),
    "internvl": Factory(
        INTERN_WORDS,
        _intern("internvl", "qwen2"),
        media(
            *("InternVLProcessor", "GotOcr2ImageProcessor", "InternVLVideoProcessor", TILES, {"size": SIDE}),
            image_seq_length=4,
        ),
    ),
    "llava_onevision": Factory(
        Words(
            ("<image>", "<video>"), {"image_token": "<image>", "video_token": "<video>"}, "<image>", "<video>"
        ),
        _onevision,
        media(
            *("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor"),
            {"size": SIDE, "image_grid_pinpoints": PINPOINTS},
            {"size": SIDE},
            num_image_tokens=16,
            vision_feature_select_strategy="full",
        ),
    ),
    "qwen2_5_vl": Factory(
        QWEN,
        _grid_model(
            "qwen2_5_vl",
            {**TOWER, "fullatt_block_indexes": [1], "window_size": 56},
            QWEN_IDS,
            QWEN_TOKENS,
        ),
        QWEN_PROCESSOR,
    ),
    "qwen2_vl": Factory(
        QWEN,
        _grid_model(
            *("qwen2_vl", {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
            *(QWEN_IDS, QWEN_TOKENS),
        ),
        media(
            *("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", GRID),
            {**CLIPS, "max_frames": 8},
        ),
    ),
}

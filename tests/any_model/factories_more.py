"""Factories for further image-text architectures, such as GLM-4V MoE and Aria."""

import torch

from tests.any_model.factories import BASE, Factory, Ids, Words
from tests.any_model.factories_grid import (
    CLIPS,
    GLM,
    GLM_IDS,
    GLM_TOKENS,
    TOWER,
    media,
    named,
)
from tests.any_model.factories_image import (
    CUT,
    GRID,
    MROPE,
    PLAIN,
    STRATEGY,
    VISION,
    WINDOWED,
    build,
    llava,
    processor,
)
from tests.any_model.factories_image import text as text_config

PATCHES = Words(
    ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)
COMPASS_TOKENS = ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")
COMPASS = Words(
    COMPASS_TOKENS,
    {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
    "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
    "<|VISION_START|><|VIDEO_PAD|><|VISION_END|>",
)
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1}
QWEN_TOWER = {**TOWER, "fullatt_block_indexes": [1], "window_size": 56}
QWEN_PAIR = ("image_token_id", "video_token_id")


def _glm4v_moe(ids: Ids) -> torch.nn.Module:
    sizes = {**EXPERTS, "topk_group": 1, "head_dim": 16, "first_k_dense_replace": 1}
    return build(
        "glm4v_moe",
        text_config={**BASE, **sizes, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
        vision_config={**TOWER, "image_size": 56},
        **named(ids, GLM_IDS, GLM_TOKENS),
    )


def _exaone(ids: Ids) -> torch.nn.Module:
    return build(
        "exaone4_5",
        text_config=text_config("exaone4", sliding_window=12, sliding_window_pattern=2),
        vision_config={**QWEN_TOWER, "num_key_value_heads": 2},
        **named(ids, QWEN_PAIR, ("<|image_pad|>", "<|video_pad|>")),
    )


def _hyperclovax(ids: Ids) -> torch.nn.Module:
    return build(
        "hyperclovax_vision_v2",
        text_config=text_config("hyperclovax", head_dim=16),
        vision_config=QWEN_TOWER,
        **named(ids, QWEN_PAIR, ("<|image_pad|>", "<|video_pad|>")),
    )


def _cohere_compass(ids: Ids) -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    layers = ["sliding_attention", "full_attention"] * 2
    return build(
        "cohere_compass",
        text_config={
            **BASE,
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": layers,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        },
        vision_config={
            **TOWER,
            "depth": 3,
            "patch_size": 14,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **named(
            ids,
            (*QWEN_PAIR, "vision_start_token_id", "vision_end_token_id"),
            COMPASS_TOKENS,
        ),
    )


def _aria(ids: Ids) -> torch.nn.Module:
    sizes = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 16}
    return build(
        "aria",
        text_config={"model_type": "aria_text", **BASE, **sizes},
        vision_config={"model_type": "idefics3_vision", **VISION, "image_size": 980, "patch_size": 140},
        projector_patch_to_query_dict={49: 4},
        image_token_index=ids["<image>"],
    )


MUSE_TOKENS = (
    *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>", "<|vid_frame_separator|>"),
    *("<|vid_start|>", "<|vid_end|>"),
)


def _muse_glimmer(ids: Ids) -> torch.nn.Module:
    return build(
        "muse_glimmer",
        text_config={**BASE, **WINDOWED},
        vision_config={
            **VISION,
            "patch_size": 14,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "max_position_embeddings": 64,
        },
        image_token_id=ids["<|patch|>"],
        video_token_id=ids["<|video|>"],
        out_hidden_size=128,
        projector_hidden_size=64,
    )


FACTORIES: dict[str, Factory] = {
    "aria": Factory(
        PLAIN,
        _aria,
        processor(
            "AriaProcessor",
            "AriaImageProcessor",
            {"max_image_size": 980},
            size_conversion={980: 4},
        ),
    ),
    "cohere_compass": Factory(
        COMPASS,
        _cohere_compass,
        media(
            *("CohereCompassProcessor", "CohereCompassImageProcessor", "CohereCompassVideoProcessor"),
            GRID,
            CLIPS,
        ),
    ),
    "exaone4_5": Factory(
        PATCHES,
        _exaone,
        media(
            *("Exaone4_5_Processor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", GRID),
            {**CLIPS, "max_frames": 8},
        ),
    ),
    "glm4v_moe": Factory(
        GLM,
        _glm4v_moe,
        media(
            *("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
            {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 16}},
            CLIPS,
        ),
    ),
    "hyperclovax_vision_v2": Factory(
        PATCHES,
        _hyperclovax,
        media(
            *("HyperCLOVAXVisionV2Processor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", GRID),
            {**CLIPS, "max_frames": 8},
        ),
    ),
    "muse_glimmer": Factory(
        Words(MUSE_TOKENS, {}, "<|patch|>", "<|video|>"),
        _muse_glimmer,
        media(
            *("MuseGlimmerProcessor", "MuseGlimmerImageProcessor", "MuseGlimmerVideoProcessor"),
            {"max_image_tokens": 8},
            {},
        ),
    ),
    "vipllava": Factory(
        PLAIN,
        llava("vipllava", vision_feature_layers=[-1, -2]),
        processor("LlavaProcessor", "CLIPImageProcessor", CUT, **STRATEGY),
    ),
}

"""Factories for image-text architectures that cut images into tiles, or whose processors need torchvision."""

import torch

from tests.any_model.factories import BASE, Factory, Ids, Words
from tests.any_model.factories_image import (
    MERGED,
    PIXTRAL_SETTINGS,
    SIDE,
    SIGLIP,
    VISION,
    WINDOWED,
    Processor,
    build,
    pixtral,
    processor,
)
from tests.any_model.factories_image import text as text_config

SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 128,
    "patch_size": 16,
    "window_size": 4,
    "global_attn_indexes": [1],
    "mlp_dim": 64,
}
COHERE = ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<image>")
COHERE_NAMES = ("image_token", "boi_token", "eoi_token", "img_line_break_token")
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _deepseek_ocr2(ids: Ids) -> torch.nn.Module:
    sizes = {**SPARSE, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
    encoder = {**VISION, "num_key_value_heads": 2}
    return build(
        "deepseek_ocr2",
        text_config={**BASE, "num_key_value_heads": 4, "head_dim": 16, **sizes},
        vision_config={"sam_config": {**SAM, "downsample_channels": [24, 32]}, "encoder_config": encoder},
        image_token_id=ids["<image>"],
    )


def _ovis2(ids: Ids) -> torch.nn.Module:
    indicators = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    return build(
        "ovis2",
        text_config=text_config("qwen2"),
        vision_config={
            **VISION,
            "image_size": 56,
            "patch_size": 14,
            "vocab_size": 64,
            "hidden_stride": 2,
            "num_visual_indicator_tokens": 5,
        },
        image_token_id=ids["<IMG_ATOM>"],
        visual_indicator_token_ids=[ids[token] for token in indicators],
        vocab_size=BASE["vocab_size"],
        hidden_size=64,
    )


def _hunyuan(ids: Ids) -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}
    sizes = {"patch_size": 16, "out_hidden_size": 64, "text_hidden_size": 64, "max_image_size": 112}
    return build(
        "hunyuan_vl",
        text_config={**BASE, "head_dim": 16, "rope_parameters": rope},
        vision_config={**VISION, "num_key_value_heads": 2, **sizes},
        image_token_id=ids["<img>"],
        im_start_id=ids["<s_img>"],
        im_end_id=ids["<e_img>"],
        im_newline_id=ids["<nl>"],
    )


def _granite_docling(ids: Ids) -> torch.nn.Module:
    sizes = {"image_size": 64, "patch_size": 8, "out_hidden_size": 64, "scale_factor": 4}
    return build(
        "granite_docling",
        text_config=BASE,
        vision_config={**VISION, **sizes, "num_hidden_layers": 4, "deepstack_visual_indexes": [1, 2]},
        image_token_id=ids["<image>"],
        pad_token_id=0,
    )


def _cohere(kind: str, name: str, token: str):
    return lambda ids: build(
        kind,
        text_config=text_config("cohere2", **WINDOWED),
        vision_config=SIGLIP,
        alignment_intermediate_size=64,
        **{name: ids[token]},
    )


def _qianfan(ids: Ids) -> torch.nn.Module:
    return build(
        "qianfan_ocr",
        vision_config={**VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        text_config=text_config("qwen3", head_dim=16),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
    )


OVIS_TOKENS = ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
INDEX = {"image_token": "<image>"}


DOCLING: Processor = processor(
    "GraniteDoclingProcessor",
    "GraniteDoclingImageProcessor",
    {"size": {"height": 64, "width": 64}, "max_patches": 3},
    image_seq_len=4,
)
FACTORIES: dict[str, Factory] = {
    "aya_vision": Factory(
        Words((*COHERE, "TILE_1", "TILE_GLOBAL"), INDEX, "<image>"),
        _cohere("aya_vision", "image_token_index", "<|IMG_PATCH|>"),
        processor(
            *("AyaVisionProcessor", "GotOcr2ImageProcessor"),
            {"size": SIDE, "crop_to_patches": True, "max_patches": 3},
            patch_size=28,
            img_size=56,
            downsample_factor=1,
        ),
    ),
    "cohere2_vision": Factory(
        Words(COHERE, dict(zip(COHERE_NAMES, COHERE, strict=False)), "<|IMG_PATCH|>"),
        _cohere("cohere2_vision", "image_token_id", "<|IMG_PATCH|>"),
        processor(
            *("Cohere2VisionProcessor", "Cohere2VisionImageProcessor"),
            {"size": SIDE, "max_patches": 3, "patch_size": 2},
        ),
    ),
    "deepseek_ocr2": Factory(
        Words(("<image>",), INDEX, "<image>"),
        _deepseek_ocr2,
        processor(
            *("DeepseekOcr2Processor", "DeepseekOcr2ImageProcessor"),
            {"size": {"height": 96, "width": 96}, "tile_size": 96, "max_patches": 2},
            patch_size=2,
            downsample_ratio=4,  # (96 / 2 / 4) ** 2 = 144 embeddings a tile
        ),
    ),
    "granite_docling": Factory(
        Words(("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"), {}, "<image>"),
        _granite_docling,
        DOCLING,
    ),
    "hunyuan_vl": Factory(
        Words(
            ("<img>", "<s_img>", "<e_img>", "<nl>"),
            {"image_token": "<img>", "image_start_token": "<s_img>", "image_end_token": "<e_img>"},
            "<s_img><img><e_img>",
        ),
        _hunyuan,
        processor(
            *("HunYuanVLProcessor", "HunYuanVLImageProcessor"),
            {"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 8}},
        ),
    ),
    "mistral3": Factory(
        Words(("[IMG]", "[IMG_BREAK]", "[IMG_END]"), {}, "[IMG]"),
        pixtral("mistral3", "mistral", "[IMG]", "image_token_index"),
        processor("PixtralProcessor", "PixtralImageProcessor", PIXTRAL_SETTINGS, **MERGED),
    ),
    "ovis2": Factory(
        Words(OVIS_TOKENS, {}, "<image>"),
        _ovis2,
        processor("Ovis2Processor", "Ovis2ImageProcessor", {"size": SIDE}, image_seq_length=4),
    ),
    "qianfan_ocr": Factory(
        Words(
            ("<IMG_CONTEXT>", "<img>", "</img>", "<image>"),
            {
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
            },
            "<image>",
        ),
        _qianfan,
        processor(
            *("QianfanOCRProcessor", "GotOcr2ImageProcessor"),
            {"size": SIDE, "crop_to_patches": True, "max_patches": 3},
            image_seq_length=4,
        ),
    ),
}

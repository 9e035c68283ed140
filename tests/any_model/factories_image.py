"""Builds small models of image-text architectures whose processors run without torchvision. Some models
encode an image as a whole, others in tiles.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from tests.any_model.factories import BASE, Factory, Ids, Words
from tests.any_model.factories_text import HALF

Processor = Callable[[Any], object]
IMAGE = ("<image>",)
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "image_size": 56, "patch_size": 14}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32}
PIXTRAL = {"model_type": "pixtral", **VISION, "head_dim": 16, "image_size": 112, "patch_size": 14}
INTERN = {**VISION, "image_size": [56, 56], "patch_size": [14, 14]}
SIDE = {"height": 56, "width": 56}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def text(kind: str, **sizes: object) -> dict[str, object]:
    return {"model_type": kind, **BASE, **sizes}


def build(kind: str, **fields: object) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=False, **fields)
    return transformers.AutoModelForImageTextToText.from_config(config)


def images(name: str, **settings: object) -> object:
    """Return an image processor. A processor based on Pillow is preferred."""
    try:
        return getattr(transformers, f"{name}Pil")(**settings)
    except (AttributeError, ImportError):
        return getattr(transformers, name)(**settings)


def processor(name: str, image_processor: str, settings: Mapping[str, object], **fields: object) -> Processor:
    def make(tokenizer: object) -> object:
        kind = getattr(transformers, name)
        return kind(image_processor=images(image_processor, **settings), tokenizer=tokenizer, **fields)

    return make


CUT = {"size": {"shortest_edge": 56}, "crop_size": SIDE}
PINPOINTS = [[56, 56], [56, 112], [112, 56], [112, 112]]
STRATEGY = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PLAIN = Words(IMAGE, {"image_token": "<image>"}, "<image>")
TILED = Words(
    (*IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    },
    "<image>",
)
GEMMA3 = Words(
    ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "<start_of_image>",
)
WINDOWED = {"head_dim": 16, "sliding_window": 12, "layer_types": HALF}
PADDLE = "<|IMAGE_PLACEHOLDER|>"
LIGHTON = Words(
    ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
    {
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    },
    "<|image_pad|>",
)


def _gemma3(ids: Ids) -> torch.nn.Module:
    return build(
        "gemma3",
        text_config=text("gemma3_text", **WINDOWED, query_pre_attn_scalar=16),
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
    )


def tiled(kind: str) -> Callable[[Ids], torch.nn.Module]:
    """Return a function that builds a model like Idefics3."""
    return lambda ids: build(
        kind,
        text_config=text("llama"),
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=0,
    )


def llava(kind: str, **fields: object) -> Callable[[Ids], torch.nn.Module]:
    """Return a function that builds a model like LLaVA."""
    return lambda ids: build(
        kind, text_config=text("llama"), vision_config=CLIP, image_token_index=ids["<image>"], **fields
    )


def _paddle(ids: Ids) -> torch.nn.Module:
    return build(
        "paddleocr_vl",
        text_config={**BASE, "head_dim": 16, "rope_parameters": MROPE},
        vision_config={**VISION, "image_size": 56},
        image_token_id=ids[PADDLE],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|IMAGE_START|>"],
        vision_end_token_id=ids["<|IMAGE_END|>"],
    )


def pixtral(kind: str, text_kind: str, image: str, name: str) -> Callable[[Ids], torch.nn.Module]:
    """Return a function that builds a model with Pixtral's tower. `name`: the config field that stores the
    token id for `image`, the image placeholder.
    """
    return lambda ids: build(
        kind, text_config=text(text_kind, head_dim=16), vision_config=PIXTRAL, **{name: ids[image]}
    )


def _got_ocr(ids: Ids) -> torch.nn.Module:
    # The processor always writes 256 placeholders: the tower has 64 x 64 patches, and merges 4 x 4 patches
    # into an embedding.
    vision = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 256,
        "patch_size": 4,
        "window_size": 4,
        "global_attn_indexes": [],
        "mlp_dim": 64,
    }
    return build(
        "got_ocr2", text_config=text("qwen2"), vision_config=vision, image_token_index=ids["<imgpad>"]
    )


def _paligemma(ids: Ids) -> torch.nn.Module:
    return build(
        "paligemma",
        text_config=text("gemma", head_dim=16),
        vision_config={**SIGLIP, "vision_use_head": False, "projection_dim": 64},
        image_token_index=ids["<image>"],
        projection_dim=64,
        hidden_size=64,
    )


SMALL_TILES = {"max_image_size": {"longest_edge": 56}, "size": {"longest_edge": 112}}
GRID = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 8}
MERGED = {"patch_size": 14, "spatial_merge_size": 2}
PIXTRAL_SETTINGS = {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}}
FACTORIES: dict[str, Factory] = {
    "gemma3": Factory(
        GEMMA3,
        _gemma3,
        processor("Gemma3Processor", "Gemma3ImageProcessor", {"size": SIDE}, image_seq_length=4),
    ),
    "got_ocr2": Factory(
        Words(("<imgpad>", "<img>", "</img>"), {}, "<imgpad>"),
        _got_ocr,
        processor("GotOcr2Processor", "GotOcr2ImageProcessor", {"size": {"height": 256, "width": 256}}),
    ),
    "idefics3": Factory(
        TILED,
        tiled("idefics3"),
        processor("Idefics3Processor", "Idefics3ImageProcessor", SMALL_TILES, image_seq_len=4),
    ),
    "lighton_ocr": Factory(
        LIGHTON,
        pixtral("lighton_ocr", "qwen3", "<|image_pad|>", "image_token_id"),
        processor("LightOnOcrProcessor", "PixtralImageProcessor", PIXTRAL_SETTINGS, **MERGED),
    ),
    "llava": Factory(
        PLAIN, llava("llava"), processor("LlavaProcessor", "CLIPImageProcessor", CUT, **STRATEGY)
    ),
    "llava_next": Factory(
        PLAIN,
        llava("llava_next", image_grid_pinpoints=PINPOINTS),
        processor(
            "LlavaNextProcessor",
            "LlavaNextImageProcessor",
            {**CUT, "image_grid_pinpoints": PINPOINTS},
            **STRATEGY,
        ),
    ),
    "paddleocr_vl": Factory(
        Words(
            (PADDLE, "<|video_pad|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
            {"image_token": PADDLE},
            f"<|IMAGE_START|>{PADDLE}<|IMAGE_END|>",
        ),
        _paddle,
        processor("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessor", GRID),
    ),
    "paligemma": Factory(
        PLAIN,
        _paligemma,
        processor("PaliGemmaProcessor", "SiglipImageProcessor", {"size": SIDE, "image_seq_length": 16}),
    ),
}

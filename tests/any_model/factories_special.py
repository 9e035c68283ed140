"""Factories for image-text architectures with special rules: experts, chunked layers, per-layer inputs,
added placeholders. Their processors need torchvision.
"""

import torch
import transformers

from tests.any_model.factories import BASE, Factory, Ids, Words
from tests.any_model.factories_image import SIDE, VISION, WINDOWED, build, images, processor
from tests.any_model.factories_text import HALF, MLA

KIMI_SIZE = {"max_height": 4, "max_width": 4}
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "audio_token_id": "<|audio|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
}
GEMMA4 = Words(
    ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
    {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    },
    "<|image|>",
    "<|video|>",
)
LLAMA4_TOKENS = (
    *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)
MOLMO_TOKENS = (
    *("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>"),
    *("<frame_end>", "<im_low>", "<|image|>", "<|video|>"),
)
STEP_TOKENS = ("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>")


def _llama4(ids: Ids) -> torch.nn.Module:
    layers = {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "no_rope_layers": [1, 1, 1, 0]}
    sizes = {"intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 12}
    vision = {
        **VISION,
        "intermediate_size": 128,
        "vision_output_dim": 64,
        "image_size": 56,
        "patch_size": 14,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    }
    return build(
        "llama4",
        text_config={**BASE, "head_dim": 16, **sizes, "moe_layers": [1, 3], **layers},
        vision_config=vision,
        image_token_index=ids["<|patch|>"],
        boi_token_index=ids["<|image_start|>"],
        eoi_token_index=ids["<|image_end|>"],
    )


def _step(ids: Ids) -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {
        **SPARSE,
        "share_expert_dim": 32,
        "layer_types": HALF,
        "sliding_window": 12,
        "head_dim": 16,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
        "num_sliding_attention_heads": 4,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
    }
    return build(
        "step3p7",
        text_config={**BASE, **sizes},
        vision_config={**VISION, "image_size": 112, "patch_size": 14},
        image_token_id=ids["<im_patch>"],
    )


def _kimi(ids: Ids) -> torch.nn.Module:
    return build(
        "kimi_k25",
        text_config={"model_type": "deepseek_v3", **MLA},
        vision_config={**VISION, "pos_emb_height": 8, "pos_emb_width": 8},
        projection_hidden_size=32,
        image_token_id=ids["<|media_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|media_begin|>"],
        vision_end_token_id=ids["<|media_end|>"],
    )


def _gemma4(ids: Ids, **sizes: object) -> torch.nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return build(
        "gemma4",
        text_config={
            **BASE,
            **WINDOWED,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": BASE["vocab_size"],
            **sizes,
        },
        vision_config={**VISION, **heads, "patch_size": 4, "pooling_kernel_size": 2},
        **{name: ids[token] for name, token in GEMMA4_IDS.items()},
    )


def _gemma4_processor(tokenizer: object) -> object:
    small = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}
    return transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=images("Gemma4ImageProcessor", **small),
        tokenizer=tokenizer,
        video_processor=transformers.Gemma4VideoProcessor(**small, num_frames=6),
        image_seq_length=70,
    )


def _kimi_processor(tokenizer: object) -> object:
    return transformers.Kimi_K25Processor(
        image_processor=images(
            "Kimi_K25ImageProcessor", max_patches=64, size={"max_height": 4, "max_width": 4}
        ),
        tokenizer=tokenizer,
        video_processor=transformers.Kimi_K25VideoProcessor(),
    )


def _molmo2(ids: Ids) -> torch.nn.Module:
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    base = ids["<im_patch>"]  # As in published models, the logits do not cover the tokens of media.
    return build(
        "molmo2",
        text_config={**BASE, "head_dim": 16, "vocab_size": base, "additional_vocab_size": 32},
        vision_config={**VISION, **heads, "image_size": [56, 56], "patch_size": 14},
        adapter_config={**VISION, **heads, "text_hidden_size": 64, "vision_feature_layer": [1, 0]},
        **{
            name: ids[token]
            for name, token in {
                "image_start_token_id": "<im_start>",
                "low_res_image_start_token_id": "<low_res_im_start>",
                "image_end_token_id": "<im_end>",
                "image_patch_id": "<im_patch>",
                "frame_start_token_id": "<frame_start>",
                "frame_end_token_id": "<frame_end>",
            }.items()
        },
    )


def _molmo2_processor(tokenizer: object) -> object:
    sizes = {"size": SIDE, "patch_size": 14, "pooling_size": [2, 2]}
    return transformers.Molmo2Processor(
        image_processor=images("Molmo2ImageProcessor", **sizes, max_crops=4, overlap_margins=[1, 1]),
        tokenizer=tokenizer,
        video_processor=transformers.Molmo2VideoProcessor(**sizes),
    )


FACTORIES: dict[str, Factory] = {
    "molmo2": Factory(
        Words(
            MOLMO_TOKENS,
            {"image_token": "<|image|>", "video_token": "<|video|>"},
            "<|image|>",
            "<|video|>",
            at_end=True,
        ),
        _molmo2,
        _molmo2_processor,
    ),
    "gemma4": Factory(
        GEMMA4, lambda ids: _gemma4(ids, use_bidirectional_attention="vision"), _gemma4_processor
    ),
    "gemma4_shared": Factory(GEMMA4, lambda ids: _gemma4(ids, num_kv_shared_layers=2), _gemma4_processor),
    "kimi_k25": Factory(
        Words(
            ("<|media_pad|>", "<|video_pad|>", "<|media_begin|>", "<|media_end|>"),
            {"image_token": "<|media_pad|>", "video_token": "<|video_pad|>"},
            "<|media_begin|><|media_pad|><|media_end|>",
            "<|video_pad|>",
        ),
        _kimi,
        _kimi_processor,
    ),
    "llama4": Factory(
        Words(LLAMA4_TOKENS, {}, "<|image|>"),
        _llama4,
        processor("Llama4Processor", "Llama4ImageProcessor", {"size": SIDE, "max_patches": 3}),
    ),
    "step3p7": Factory(
        Words(STEP_TOKENS, {}, "<im_patch>"),
        _step,
        processor(
            *("Step3p7Processor", "Step3p7ImageProcessor"),
            {"size": {"height": 112, "width": 112}, "patch_size": 56, "max_image_size": 224},
        ),
    ),
}

"""Factories for text architectures."""

import torch
import transformers

from tests.any_model.factories import BASE, Factory, Ids, Words

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    **BASE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
SIZES: dict[str, dict[str, object]] = {
    "cohere2": {**BASE, "sliding_window": 12, "layer_types": HALF},
    "deepseek_v3": MLA,
    "gemma2": {
        **BASE,
        "head_dim": 16,
        "sliding_window": 12,
        "query_pre_attn_scalar": 16,
        "layer_types": HALF,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **BASE,
        "head_dim": 16,
        "sliding_window": 12,
        "query_pre_attn_scalar": 16,
        "layer_types": HALF,
    },
    "gemma3n_text": {
        **BASE,
        "intermediate_size": [96] * 4,
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": HALF,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": BASE["vocab_size"],
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **BASE,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 12,
        "layer_types": HALF,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": BASE["vocab_size"],
        "num_kv_shared_layers": 2,
    },
    "glm4": {**BASE, "head_dim": 16},
    "gpt_oss": {**BASE, **EXPERTS, "head_dim": 16, "sliding_window": 12, "layer_types": HALF},
    "granite": {
        **BASE,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
    },
    "mistral": {**BASE, "head_dim": 16, "sliding_window": 12},
    "mixtral": {**BASE, **EXPERTS, "head_dim": 16, "sliding_window": None},
    "olmo2": BASE,
    "phi3": {**BASE, "sliding_window": 12},
    "starcoder2": {**BASE, "sliding_window": 12},
}


def text_factory(kind: str, sizes: dict[str, object]) -> Factory:
    def model(_: Ids) -> torch.nn.Module:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config)

    return Factory(Words(), model)


TEXT = {kind: text_factory(kind, sizes) for kind, sizes in SIZES.items()}

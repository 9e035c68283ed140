"""Builds config.json and generation_config.json from the metadata of a GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.gguf import gemma3, qwen35
from mmengine.checkpoint.gguf.container import Container
from mmengine.checkpoint.gguf.stored_lists import SECTIONS
from mmengine.checkpoint.gguf.tensors import MAX_EXPERTS, ROPE_FACTORS, tensor_entry
from mmengine.checkpoint.gguf.tokenizer import end_ids, num_tokens, token_ids

OUTPUT = "output.weight"
MAX_HEADS = 1024  # Maximum number of query heads, and of key-value heads.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PROJECTOR = "clip"  # The architecture of a projector's file.
IDEFICS3, QWEN3_VL, GEMMA3 = "idefics3", "qwen3vl_merger", "gemma3"  # Projector types.
QWEN2_VL, QWEN2_5_VL = "qwen2vl_merger", "qwen2.5vl_merger"
DEEPSTACK = "n_deepstack_layers"
_EXPERTS = {  # Mixture-of-experts key -> (field in config.json, maximum).
    "expert_count": ("num_experts", MAX_EXPERTS),
    "expert_used_count": ("num_experts_per_tok", MAX_EXPERTS),
    "expert_feed_forward_length": ("moe_intermediate_size", 2**20),
}
_INTEGERS = {  # Required key -> (field in config.json, maximum).
    "context_length": ("max_position_embeddings", 2**24),
    "embedding_length": ("hidden_size", 2**17),
    "feed_forward_length": ("intermediate_size", 2**20),
    "block_count": ("num_hidden_layers", 1024),
    "attention.head_count": ("num_attention_heads", MAX_HEADS),
}
_READ = frozenset(
    (*_INTEGERS, "attention.head_count_kv", "attention.key_length", "attention.value_length")
    + ("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count")
    + ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "vocab_size")
    + ("rope.scaling.original_context_length", "rope.scaling.finetuned")
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A supported architecture.

    `pairs_rows`: whether the rows of q and k are permuted for ggml's rotary embedding
    (`paired_heads` in tensors.py). `projectors`: the projector types with which the model takes images.
    `is_vision`: whether every model of this architecture takes images. `keys`: metadata keys that are
    supported in addition to `_READ`. `is_hybrid`: whether some layers have delta nets (qwen35.py).
    `is_gemma`: whether the model is a Gemma 3 (gemma3.py).
    """

    name: str  # The class in transformers; for a vision model, the class of its text model.
    model_type: str
    pairs_rows: bool = False
    projectors: tuple[str, ...] = ()
    is_vision: bool = False
    is_hybrid: bool = False
    is_gemma: bool = False
    keys: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", pairs_rows=True, projectors=(IDEFICS3,)),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", keys=tuple(_EXPERTS)),
    "qwen3vl": Architecture(
        "Qwen3ForCausalLM", "qwen3", projectors=(QWEN3_VL,), is_vision=True, keys=(SECTIONS, DEEPSTACK)
    ),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        projectors=(QWEN3_VL,),
        is_vision=True,
        keys=(SECTIONS, DEEPSTACK, *_EXPERTS),
    ),
    "qwen2vl": Architecture(
        "Qwen2ForCausalLM", "qwen2", projectors=(QWEN2_VL, QWEN2_5_VL), is_vision=True, keys=(SECTIONS,)
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", projectors=(GEMMA3,), is_gemma=True, keys=gemma3.KEYS
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        projectors=(QWEN3_VL,),
        is_vision=True,
        is_hybrid=True,
        keys=qwen35.KEYS,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        projectors=(QWEN3_VL,),
        is_vision=True,
        is_hybrid=True,
        keys=(*qwen35.KEYS, *_EXPERTS, qwen35.SHARED_SIZE),
    ),
}


def architecture_of(container: Container) -> Architecture:
    """Return the model's architecture. Raises ModelError if the architecture is not supported."""
    fields = container.fields
    kind = fields.values.get("general.architecture")
    if kind == PROJECTOR:
        fields.fail("it is a projector, not a model; give the model's file, and this one with --mmproj")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        shown = "missing" if kind is None else repr(kind)[:60]
        fields.fail(
            f"general.architecture is {shown}; supported in GGUF files are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[kind]


def known_architecture(container: Container) -> Architecture | None:
    """Return the model's architecture, or None if it is not supported."""
    kind = container.metadata.get("general.architecture")
    return ARCHITECTURES.get(kind) if isinstance(kind, str) else None


def model_config(container: Container) -> dict[str, object]:
    """Return a text model's config.json as transformers writes it.

    Raises ModelError for missing or invalid sizes, and for unknown metadata keys of the architecture.
    """
    found, fields = architecture_of(container), text_fields(container)
    for name in sorted(fields.values.keys() - _READ - set(found.keys)):
        shown = repr(fields.values[name])[:60]
        fields.fail(f"{fields.prefix}{name} is {shown}, which is not supported")
    has_experts = "expert_count" in found.keys
    sizes = {
        name: fields.integer(key, 1, most)
        for key, (name, most) in _INTEGERS.items()
        if key in fields.values or not (has_experts and key == "feed_forward_length")
    }
    config: dict[str, object] = {"architectures": [found.name], "model_type": found.model_type, **sizes}
    config["num_key_value_heads"] = _num_kv_heads(fields)
    default = sizes["hidden_size"] // sizes["num_attention_heads"]
    head_dim = _head_dim(fields, default, is_partial=found.is_hybrid)
    config["head_dim"] = head_dim
    config["vocab_size"] = fields.integer("vocab_size", 1, 2**22, num_tokens(container))
    config["rms_norm_eps"] = fields.number("attention.layer_norm_rms_epsilon", 0)
    rope = _rope(fields, container, head_dim)
    config["rope_parameters"] = rope
    if found.is_gemma:
        config |= gemma3.gemma_config(fields, config)
    elif "attention.sliding_window" in fields.values:
        # Mistral's files have the architecture "llama", but transformers' Llama has no windows.
        window = fields.integer("attention.sliding_window", 1, 2**24)
        config |= {"sliding_window": window, "use_sliding_window": True}
    if found.is_hybrid:
        config |= qwen35.hybrid_config(fields)
        config["rope_parameters"] = qwen35.hybrid_rope(fields, rope, head_dim)
    if has_experts:
        config |= {name: fields.integer(key, 1, most) for key, (name, most) in _EXPERTS.items()}
        layers = range(sizes["num_hidden_layers"])
        dense = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in container.tensors]
        config |= {"mlp_only_layers": dense, "norm_topk_prob": True}
    config["hidden_act"] = "silu"
    config["attention_bias"] = any(name.endswith(".attn_q.bias") for name in container.tensors)
    config["mlp_bias"] = any(name.endswith(".ffn_up.bias") for name in container.tensors)
    config["tie_word_embeddings"] = OUTPUT not in container.tensors
    ids = token_ids(container)
    for name, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("pad", "padding_token_id")):
        config[f"{name}_token_id"] = ids.get(key)
    return config


def generation_config(container: Container) -> dict[str, object]:
    """Return generation_config.json with the end-of-sequence tokens. Raises ModelError if there are none."""
    ends = end_ids(container)
    if not ends:
        container.fields.fail("tokenizer.ggml.eos_token_id is missing; nothing would end an answer")
    return {"eos_token_id": ends}


def paired_heads(container: Container) -> Callable[[str], int]:
    """Return a function from a tensor's transformers name to its head count, or to 0 if the tensor's rows are
    not permuted. Raises ModelError.
    """
    if not architecture_of(container).pairs_rows:
        return lambda name: 0
    fields = text_fields(container)
    heads = {".self_attn.q_proj.": fields.integer("attention.head_count", 1, MAX_HEADS)}
    heads[".self_attn.k_proj."] = _num_kv_heads(fields)
    return lambda name: next((count for part, count in heads.items() if part in name), 0)


def text_fields(container: Container) -> Fields:
    """Return the architecture's metadata. Keys are without the prefix "<architecture>."."""
    prefix = f"{container.metadata['general.architecture']}."
    own = {key: value for key, value in container.metadata.items() if key.startswith(prefix)}
    return Fields({key.removeprefix(prefix): value for key, value in own.items()}, container.path, prefix)


def _num_kv_heads(fields: Fields) -> int:
    num_heads = fields.integer("attention.head_count", 1, MAX_HEADS)
    return fields.integer("attention.head_count_kv", 1, MAX_HEADS, num_heads)


def _head_dim(fields: Fields, default: int, *, is_partial: bool = False) -> int:
    """Return a head's size. `is_partial`: whether the rotary embedding may be narrower than a head."""
    head_dim = fields.integer("attention.key_length", 2, 1024, default)
    for name in ("attention.value_length", *(() if is_partial else ("rope.dimension_count",))):
        if (other := fields.integer(name, 1, 1024, head_dim)) != head_dim:
            fields.fail(
                f"{fields.prefix}{name} is {other}, but a head has {head_dim}; only equal sizes are supported"
            )
    return head_dim


def _rope(fields: Fields, container: Container, head_dim: int) -> dict[str, object]:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.values.get("rope.scaling.type", "none")
    if not isinstance(kind, str):
        fields.fail(f"{fields.prefix}rope.scaling.type is {repr(kind)[:60]}; it must be a name")
    if ROPE_FACTORS in container.tensors:
        return {"rope_theta": theta} | _llama3(container, theta, head_dim)
    rope: dict[str, object] = {"rope_theta": theta, "rope_type": "default"}
    if kind != "none":
        rope |= {"rope_type": kind, "factor": fields.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        length = fields.integer("rope.scaling.original_context_length", 1, 2**24)
        rope["original_max_position_embeddings"] = length
    return rope


def _llama3(container: Container, theta: float, head_dim: int) -> dict[str, object]:
    """Return the Llama 3 rope options that reproduce the frequency factors in the file.

    Llama 3's factors are 1 for wavelengths up to 2,048 positions, and `factor` above 8,192. Other wavelengths
    have factors in between. Raises ModelError if the file's factors do not follow this rule.
    """
    entry = tensor_entry(container.tensors[ROPE_FACTORS])
    if entry.shape != (head_dim // 2,):
        container.fields.fail(
            f"{ROPE_FACTORS} has shape {list(entry.shape)}; {head_dim // 2} values are required"
        )
    ((_, factors),) = entry.pieces(0, head_dim // 2)
    factor = float(factors.max())
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ease = np.clip((LLAMA3["original_max_position_embeddings"] / waves - 1) / 3, 0, 1)
    with np.errstate(all="ignore"):
        made = 1 / ((1 - ease) / factor + ease)
    if not factor >= 1 or not np.allclose(factors, made, rtol=1e-4):
        container.fields.fail(
            f"{ROPE_FACTORS} scales frequencies differently from Llama 3.1, which is not supported"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}

"""Makes tiny random EAGLE-3 draft heads in each training tool's file format."""

import json
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

from mmengine.spec_decode.eagle3.config import Target

TARGET = Target(hidden_size=48, vocab_size=96, num_layers=12)
DEFAULT_AUX_LAYERS = (2, 6, 9)
H, HEADS, KV_HEADS, HEAD_DIM, WIDE, DRAFT_VOCAB = 48, 4, 2, 16, 80, 40
MROPE = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}


@dataclass
class Written:
    """A draft head in memory: its config.json, and its stored tensors."""

    config: dict
    tensors: dict
    # Parameters for eagle3_dense.py's `dense` that are not in the file.
    traits: dict = field(default_factory=dict)

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors"
        )
        return folder


def layer_tensors(prefix, generator, h=H, embed=H, qk_norm=False, bias=False, first=True):
    def draw(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def norm(size):
        return 1 + 0.3 * torch.randn(size, generator=generator)

    width = embed + h if first else h
    tensors = {
        "self_attn.q_proj.weight": 2 * draw(HEADS * HEAD_DIM, width),
        "self_attn.k_proj.weight": 2 * draw(KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj.weight": draw(h, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": draw(WIDE, h),
        "mlp.up_proj.weight": draw(WIDE, h),
        "mlp.down_proj.weight": draw(h, WIDE),
        "input_layernorm.weight": norm(embed if first else h),
        "post_attention_layernorm.weight": norm(h),
    }
    if first:
        tensors["hidden_norm.weight"] = norm(h)
    if qk_norm:
        tensors |= {"self_attn.q_norm.weight": norm(HEAD_DIM), "self_attn.k_norm.weight": norm(HEAD_DIM)}
    if bias:
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"self_attn.{name}_proj.bias"] = torch.randn(heads * HEAD_DIM, generator=generator)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def head_tensors(layer_prefix, generator, h=H, vocab=DRAFT_VOCAB, aux_hidden_states=3, **options):
    tensors = {
        "fc.weight": torch.randn(h, aux_hidden_states * TARGET.hidden_size, generator=generator) / 12,
        "norm.weight": 1 + 0.3 * torch.randn(h, generator=generator),
        "lm_head.weight": torch.randn(vocab, h, generator=generator) / 4,
    }
    return tensors | layer_tensors(layer_prefix, generator, h, **options)


def vocabulary_maps(generator, vocab=DRAFT_VOCAB):
    ids = torch.randperm(TARGET.vocab_size, generator=generator)[:vocab].sort().values
    has = torch.zeros(TARGET.vocab_size, dtype=torch.bool)
    has[ids] = True
    return {"d2t": ids - torch.arange(vocab), "t2d": has}


def sizes(**others):
    return {
        "hidden_size": H,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": TARGET.vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    } | others


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def specforge():
    """Return a head in EAGLE's layout, which SpecForge and SGLang also write."""
    g = _generator(1)
    config = sizes(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        draft_vocab_size=DRAFT_VOCAB,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        target_model_type="qwen2_5_vl",
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        bos_token_id=151643,
        use_cache=True,
        transformers_version="4.53.0",
    )
    return Written(
        config, head_tensors("midlayer.", g) | vocabulary_maps(g), {"axis": [0] * 2 + [1] * 3 + [2] * 3}
    )


def angelslim():
    """Return a head in AngelSlim's layout. The config sets tie_word_embeddings, although the head has an
    output matrix.
    """
    g = _generator(2)
    config = sizes(
        architectures=["Eagle3LlamaForCausalLM"],
        model_type="llama",
        modal_type="VLM",
        target_model_type="qwen3_vl",
        image_token_id=151655,
        draft_vocab_size=DRAFT_VOCAB,
        tie_word_embeddings=True,
        rope_theta=5000000,
        rope_scaling=MROPE,
    )
    return Written(
        config,
        head_tensors("midlayer.", g) | vocabulary_maps(g),
        {"theta": 5e6, "axis": [0, 1, 2, 0, 1, 2, 0, 0]},
    )


def speculators():
    """Return a head in speculators' layout, with EAGLE 3.1's flags, its own embedding, and explicit layer
    ids.
    """
    g = _generator(3)
    layer = sizes(model_type="llama", rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    del layer["rope_theta"], layer["rope_scaling"]
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [1, 5, 12],
        "embed_requires_grad": False,
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": [], "name_or_path": "Qwen/Qwen3-VL-2B-Instruct"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
    tensors = head_tensors("layers.0.", g) | vocabulary_maps(g)
    tensors |= {f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(H, generator=g) for i in range(3)}
    tensors["embed_tokens.weight"] = torch.randn(TARGET.vocab_size, H, generator=g)
    tensors["verifier_norm.weight"] = torch.ones(H)
    traits = {"theta": 2e4, "norm_before_residual": True, "norm_output": True, "taps": (1, 5, 12)}
    return Written(config, tensors, traits)


def modelopt():
    """Return a head in ModelOpt's layout. It uses the target's output matrix and vocabulary, a single norm
    before fc, and llama3's RoPE scaling.
    """
    g = _generator(4)
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = sizes(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        mlp_bias=False,
        bos_token_id=None,
        draft_vocab_size=TARGET.vocab_size,
        tie_word_embeddings=False,
        rope_theta=500000.0,
        rope_scaling=llama3,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
            "norm_before_fc": True,
        },
    )
    tensors = head_tensors("layers.0.", g, vocab=TARGET.vocab_size)
    del tensors["lm_head.weight"]
    tensors["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * H, generator=g)
    return Written(config, tensors, {"theta": 5e5, "llama3": llama3, "taps": (2, 6, 9)})


def qwen3():
    """Return a Qwen3 head. It has norms for q and k heads, biases, and a smaller hidden size than the
    target.
    """
    g = _generator(5)
    h = 32
    config = sizes(
        architectures=["Eagle3Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=h,
        target_hidden_size=TARGET.hidden_size,
        attention_bias=True,
        draft_vocab_size=DRAFT_VOCAB,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        tie_word_embeddings=False,
    )
    del config["head_dim"]
    tensors = head_tensors("model.midlayer.", g, h=h, embed=H, qk_norm=True, bias=True) | vocabulary_maps(g)
    tensors = {f"model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(HEAD_DIM // 2)
    return Written(config, tensors, {"linear": 2.0})


def deep():
    """Return a head with two layers and its own output matrix for the whole vocabulary. A fused tensor stores
    q, k and v, and another fused tensor stores gate and up.
    """
    g = _generator(6)
    config = sizes(architectures=["Eagle3Qwen3vlForCausalLM"], num_hidden_layers=2, num_aux_hidden_states=3)
    tensors = head_tensors("layers.0.", g, vocab=TARGET.vocab_size)
    tensors |= layer_tensors("layers.1.", g, first=False)
    tensors["d2t"] = torch.zeros(TARGET.vocab_size, dtype=torch.int64)
    for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        kind = fused.split(".")[0]
        names = [f"layers.0.{kind}.{part}_proj.weight" for part in parts]
        tensors[f"layers.0.{fused}.weight"] = torch.cat([tensors.pop(name) for name in names])
    return Written(config, tensors)


FAMILIES = {f.__name__: f for f in (specforge, angelslim, speculators, modelopt, qwen3, deep)}


def edited(family, **changes):
    """Return a family's head with changed config values. None deletes a field. `a__b` stands for the field b
    in the object a.
    """
    written = FAMILIES[family]()
    for path, value in changes.items():
        *parents, name = path.split("__")
        at = written.config
        for parent in parents:
            at = at[parent]
        at[name] = value
        if value is None:
            del at[name]
    return written

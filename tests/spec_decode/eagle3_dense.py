"""A reference implementation of an EAGLE-3 head, which follows the formulas and computes a whole sequence."""

import torch

from tests.spec_decode.eagle3_heads import HEAD_DIM, HEADS, KV_HEADS, TARGET


def plain_names(written):
    """Return the tensors by their names in the formulas. Fused tensors are split."""
    named = {}
    for name, tensor in written.tensors.items():
        named[name.removeprefix("model.").replace("midlayer.", "layers.0.")] = tensor.float()
    for name in [n for n in named if "qkv_proj" in n]:
        parts = named.pop(name).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        named |= {name.replace("qkv", part): tensor for part, tensor in zip("qkv", parts, strict=True)}
    for name in [n for n in named if "gate_up_proj" in n]:
        gate, up = named.pop(name).chunk(2)
        named |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return named


def rms(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def dense_fuse(written, aux_hidden_states):
    """Project a sequence's auxiliary states, [n, 3 * H], to g, the head's hidden states [n, h]."""
    w = plain_names(written)
    if "input_norm.weight" in w:
        aux_hidden_states = rms(aux_hidden_states, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        parts = aux_hidden_states.split(TARGET.hidden_size, -1)
        aux_hidden_states = torch.cat([rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], -1)
    return aux_hidden_states @ w["fc.weight"].T


def dense(written, hidden, embeds, positions):
    """Compute a whole sequence. Return two tensors: the LM head's input, and the next pass's hidden states.
    `hidden`: [n, h]. `embeds`: the next tokens' embeddings [n, e]. `positions`: [3, n].
    """
    w, traits = plain_names(written), written.traits
    x = hidden
    for index in range(written.config.get("num_hidden_layers", 1)):
        p = f"layers.{index}."
        if index == 0:
            u = rms(x, w[p + "hidden_norm.weight"])
            if traits.get("norm_before_residual"):
                x = u
            inputs = torch.cat([rms(embeds, w[p + "input_layernorm.weight"]), u], -1)
        else:
            inputs = rms(x, w[p + "input_layernorm.weight"])
        q, k, v = (
            (inputs @ w[f"{p}self_attn.{n}_proj.weight"].T + w.get(f"{p}self_attn.{n}_proj.bias", 0)).view(
                len(x), -1, HEAD_DIM
            )
            for n in "qkv"
        )
        if p + "self_attn.q_norm.weight" in w:
            q, k = rms(q, w[p + "self_attn.q_norm.weight"]), rms(k, w[p + "self_attn.k_norm.weight"])
        q, k = turned(q, positions, traits), turned(k, positions, traits)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        y = rms(x, w[p + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ w[p + "mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    z = rms(x, w["norm.weight"])
    return z, (z if traits.get("norm_output") else x)


def turned(x, positions, traits):
    """Apply RoPE: rotate the pairs (i, i + half) in each head by position * frequency."""
    half = HEAD_DIM // 2
    out = torch.empty_like(x)
    for i in range(half):
        frequency = traits.get("theta", 1e4) ** (-2 * i / HEAD_DIM) / traits.get("linear", 1)
        if "llama3" in traits:
            frequency = llama3(frequency, traits["llama3"])
        angle = positions[traits.get("axis", [0] * half)[i]].double() * frequency
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def llama3(frequency, rope):
    wave, context = 2 * torch.pi / frequency, rope["original_max_position_embeddings"]
    if wave < context / rope["high_freq_factor"]:
        return frequency
    if wave > context / rope["low_freq_factor"]:
        return frequency / rope["factor"]
    share = (context / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    return (1 - share) * frequency / rope["factor"] + share * frequency

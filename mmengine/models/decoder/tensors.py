"""Which tensors a text decoder has, by canonical name."""

from mmengine.models.decoder.config import DecoderConfig

EMBEDDING = "text.embed_tokens.weight"
NORM = "text.norm.weight"
HEAD = "lm_head.weight"
Shapes = dict[str, tuple[int, ...]]


def layer_name(index: int) -> str:
    return f"text.layers.{index}"


def decoder_tensors(c: DecoderConfig) -> Shapes:
    """Their shapes; linear weights are [out, in]. Files of a tied model may lack HEAD."""
    layer = _layer_tensors(c)
    shapes: Shapes = {
        EMBEDDING: (c.vocab_size, c.hidden_size),
        NORM: (c.hidden_size,),
        HEAD: (c.vocab_size, c.hidden_size),
    }
    for i in range(c.num_layers):
        shapes |= {f"{layer_name(i)}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_tensors(c: DecoderConfig) -> Shapes:
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: Shapes = {"input_layernorm.weight": (c.hidden_size,)}
    shapes |= {"post_attention_layernorm.weight": (c.hidden_size,)}
    linears = (
        ("self_attn.q_proj", q_size, c.hidden_size, c.qkv_bias),
        ("self_attn.k_proj", kv_size, c.hidden_size, c.qkv_bias),
        ("self_attn.v_proj", kv_size, c.hidden_size, c.qkv_bias),
        ("self_attn.o_proj", c.hidden_size, q_size, c.out_bias),
        ("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
    )
    for name, out, inputs, biased in linears:
        shapes[f"{name}.weight"] = (out, inputs)
        if biased:
            shapes[f"{name}.bias"] = (out,)
    if c.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes

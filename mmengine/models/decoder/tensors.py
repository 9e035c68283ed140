"""Lists a text decoder's tensors by canonical name, with their shapes."""

from mmengine.models.decoder.config import DecoderConfig, DeltaConfig, ExpertsConfig

ROUTER, SHARED, SHARED_GATE = "mlp.gate", "mlp.shared_expert", "mlp.shared_expert_gate"
EMBEDDING = "text.embed_tokens.weight"
NORM = "text.norm.weight"
HEAD = "lm_head.weight"
Shapes = dict[str, tuple[int, ...]]
Linears = list[tuple[str, int, int, bool]]  # (module name, out, in, whether the layer has a bias)


def layer_name(index: int) -> str:
    return f"text.layers.{index}"


def expert_name(index: int) -> str:
    """Return an expert's name within its layer."""
    return f"mlp.experts.{index}"


def decoder_tensors(c: DecoderConfig) -> Shapes:
    """Return canonical name -> shape for each tensor. Linear weights are [out, in]. A tied model may lack
    HEAD.
    """
    shapes: Shapes = {
        EMBEDDING: (c.vocab_size, c.hidden_size),
        NORM: (c.hidden_size,),
        HEAD: (c.vocab_size, c.hidden_size),
    }
    for i in range(c.num_layers):
        shapes |= {f"{layer_name(i)}.{name}": shape for name, shape in _layer_tensors(c, i).items()}
    return shapes


def _layer_tensors(c: DecoderConfig, index: int) -> Shapes:
    shapes: Shapes = {"input_layernorm.weight": (c.hidden_size,)}
    shapes |= {"post_attention_layernorm.weight": (c.hidden_size,)}
    shapes |= _linears(_feed_forward(c, c.experts_of(index)))
    if c.delta is not None and c.is_delta(index):
        return shapes | _delta_tensors(c.delta, c.hidden_size)
    return shapes | _attention_tensors(c)


def _attention_tensors(c: DecoderConfig) -> Shapes:
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears: Linears = [
        ("self_attn.q_proj", q_size * (2 if c.gated else 1), c.hidden_size, c.qkv_bias),
        ("self_attn.k_proj", kv_size, c.hidden_size, c.qkv_bias),
        ("self_attn.v_proj", kv_size, c.hidden_size, c.qkv_bias),
        ("self_attn.o_proj", c.hidden_size, q_size, c.out_bias),
    ]
    shapes = _linears(linears)
    if c.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _delta_tensors(d: DeltaConfig, hidden_size: int) -> Shapes:
    values = d.num_heads * d.value_dim
    linears: Linears = [
        ("linear_attn.in_proj_qkv", d.width, hidden_size, False),
        ("linear_attn.in_proj_z", values, hidden_size, False),
        ("linear_attn.in_proj_b", d.num_heads, hidden_size, False),
        ("linear_attn.in_proj_a", d.num_heads, hidden_size, False),
        ("linear_attn.out_proj", hidden_size, values, False),
    ]
    return _linears(linears) | {
        "linear_attn.conv1d.weight": (d.width, 1, d.taps),
        "linear_attn.A_log": (d.num_heads,),
        "linear_attn.dt_bias": (d.num_heads,),
        "linear_attn.norm.weight": (d.value_dim,),
    }


def _linears(linears: Linears) -> Shapes:
    shapes: Shapes = {}
    for name, out, inputs, biased in linears:
        shapes[f"{name}.weight"] = (out, inputs)
        if biased:
            shapes[f"{name}.bias"] = (out,)
    return shapes


def _feed_forward(c: DecoderConfig, experts: ExpertsConfig | None) -> Linears:
    if experts is None:
        return _swiglu("mlp", c.hidden_size, c.intermediate_size, c.mlp_bias)
    linears: Linears = [(ROUTER, experts.count, c.hidden_size, False)]
    for i in range(experts.count):
        linears += _swiglu(expert_name(i), c.hidden_size, experts.intermediate_size, False)
    if experts.shared_size:
        linears += _swiglu(SHARED, c.hidden_size, experts.shared_size, False)
        linears.append((SHARED_GATE, 1, c.hidden_size, False))
    return linears


def _swiglu(module: str, hidden: int, wide: int, biased: bool) -> Linears:
    sizes = (("gate_proj", wide, hidden), ("up_proj", wide, hidden), ("down_proj", hidden, wide))
    return [(f"{module}.{name}", out, inputs, biased) for name, out, inputs in sizes]

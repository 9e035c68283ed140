"""Reads config.json for model plugins, and rejects unsupported values. Does not import torch."""

from collections.abc import Callable, Iterable

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.quantisation import SUPPORTED, quantisation_of
from mmengine.checkpoint.rope import RopeConfig, read_rope
from mmengine.models.decoder.config import DecoderConfig, ExpertsConfig

MAX_LAYERS = 1024
MAX_EXPERTS = 2**16  # Maximum total number of experts in all layers.
# Unsupported options of routers, each with the value that turns the option off.
ROUTERS: dict[str, object] = {
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "use_routing_bias": False,
}


def check_served(root: Fields, architectures: tuple[str, ...], parts: Iterable[str] = ()) -> None:
    """Raise ModelError for an architecture outside `architectures`, an unsupported quantisation, or a model
    with its own code. `parts`: names of nested objects that must have neither a quantisation nor code.
    """
    found = root.values.get("architectures")
    if not isinstance(found, list) or not any(name in found for name in architectures):
        root.fail(f"architectures is {repr(found)[:200]}; this plugin serves {', '.join(architectures)}")
    quantisation_of(root)
    for fields in (root, *(root.child(part) for part in parts)):
        if fields is not root and fields.values.get("quantization_config") is not None:
            root.fail(f"{fields.prefix}quantization_config must not be in a nested object; {SUPPORTED}")
        if fields.values.get("auto_map") is not None:
            root.fail(f"{fields.prefix}auto_map requires the model's own code, which is never run")


def read_decoder(
    fields: Fields,
    *,
    tied: bool,
    head_dim: int | None = None,
    rope: Callable[[Fields, int], RopeConfig] = read_rope,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    experts: ExpertsConfig | None = None,
    mixers: tuple[str, ...] = ("full_attention",),
    windowed: bool = False,
) -> DecoderConfig:
    """Read a decoder's config from `fields`. The other arguments are options that config.json does not
    contain. Raises ModelError that names the field.

    `head_dim`: the value if the file has no such field; None means hidden_size / heads. `rope`: reads the
    rotary options from the fields and head_dim. `mixers`: the allowed values in layer_types. `windowed`:
    whether the model family applies sliding_window even without use_sliding_window. Models that apply a
    sliding window are rejected.
    """
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    is_dense = experts is None or len(experts.layers) < num_layers
    hidden_size = fields.integer("hidden_size", 1, 2**17)
    num_heads = fields.integer("num_attention_heads", 1, 1024)
    num_kv_heads = fields.integer("num_key_value_heads", 1, 1024, num_heads)
    head_dim = fields.integer("head_dim", 2, 1024, head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        where = f"{fields.prefix.removesuffix('.')}: " if fields.prefix else ""
        fields.fail(f"{where}{num_heads} heads cannot be shared by {num_kv_heads} key-value heads")
    if fields.values.get("hidden_act", "silu") != "silu":
        activation = repr(fields.values["hidden_act"])[:60]
        fields.fail(f"{fields.prefix}hidden_act {activation} is not supported, only silu")
    rotary = rope(fields, head_dim)
    if head_dim % 2:
        fields.fail(f"{fields.prefix}head_dim {head_dim} is odd; halves of a head are rotated")
    _refuse_windows(fields, mixers, windowed)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size", 1, 2**22),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 2**20) if is_dense else 0,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=fields.integer("max_position_embeddings", 1, 2**24),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rotary,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied=tied,
        experts=experts,
    )


def read_experts(fields: Fields, *, norm_top_k: bool) -> ExpertsConfig | None:
    """Return which layers have experts and how the router selects experts, or None if all layers are dense.

    `norm_top_k`: whether the selected experts' probabilities are divided by their sum. Raises ModelError that
    names the field.
    """
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    every = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = fields.integers("mlp_only_layers", [], 0, MAX_LAYERS - 1, MAX_LAYERS)
    layers = tuple(i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense)
    experts = read_mixture(fields, layers, norm_top_k=norm_top_k)
    return experts if layers else None


def read_mixture(fields: Fields, layers: tuple[int, ...], *, norm_top_k: bool) -> ExpertsConfig:
    """Return the experts' sizes and the router's options. `layers`: the layers with experts."""
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    count = fields.integer(name, 1, MAX_EXPERTS // num_layers)
    for field, plain in ROUTERS.items():
        if fields.values.get(field, plain) not in (plain, None):
            found = repr(fields.values[field])[:60]
            fields.fail(f"{fields.prefix}{field} {found} is not supported: only softmax routers are")
    return ExpertsConfig(
        count,
        top_k=fields.integer("num_experts_per_tok", 1, count),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 2**20),
        layers=layers,
        norm_top_k=norm_top_k,
    )


def _refuse_windows(fields: Fields, mixers: tuple[str, ...], windowed: bool) -> None:
    """Raise ModelError for layer types that are not in `mixers`, and for sliding windows."""
    kinds = fields.values.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(one not in mixers for one in kinds)):
        known = " and ".join(mixers)
        fields.fail(f"{fields.prefix}layer_types is {repr(kinds)[:100]}; only {known} is supported")
    window = fields.values.get("sliding_window")
    if fields.flag("use_sliding_window", False) or windowed and window is not None:
        shown = repr(window)[:60]
        fields.fail(
            f"{fields.prefix}sliding_window {shown} needs sliding windows, which only transformers' modules "
            "support; set model_impl to transformers (--model-impl transformers)"
        )

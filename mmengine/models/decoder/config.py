"""Defines a text decoder's sizes and options as dataclasses, without torch."""

from dataclasses import dataclass

from mmengine.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: `count` SwiGLUs in each layer of `layers`.

    A token's output is the weighted sum over its `top_k` likeliest experts. The weights are the router's
    probabilities, a float32 softmax over all experts.
    """

    count: int
    top_k: int  # At most `count`.
    intermediate_size: int  # The intermediate size of each expert.
    layers: tuple[int, ...]  # Layers with experts; the others are dense.
    norm_top_k: bool = True  # Whether the selected experts' probabilities are divided by their sum.
    # The intermediate size of a shared expert with a sigmoid gate; 0: no shared expert.
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta net (delta.py), which replaces attention in `layers`. `num_heads`: the number of value
    heads, a multiple of `num_key_heads`. `tiled`: whether value head h uses key head h % `num_key_heads`, as
    in GGUF files. Otherwise neighbouring value heads share a key head.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4  # The kernel size of the convolution before the delta rule.
    tiled: bool = False

    @property
    def width(self) -> int:
        """Return the number of channels in the convolution: all heads of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder whose layers have attention, SwiGLU and RMS norms. Some layers may have experts instead of
    the SwiGLU, and some may have a delta net instead of attention.

    `num_heads` is divisible by `num_kv_heads`, and `head_dim` by 2. `intermediate_size` is 0 if no layer has
    a dense SwiGLU.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    out_bias: bool = False  # Whether attention's output projection has a bias.
    mlp_bias: bool = False
    qk_norm: bool = False  # Whether each head in q and k is normed before rotation.
    tied: bool = False  # Whether the LM head uses the embedding's matrix.
    rotary_dim: int = 0  # Number of rotated values at the start of a head; 0: all.
    # Whether q_proj also computes a gate for each head. In q_proj's output, the gate follows the head's q.
    # The gate's sigmoid scales the head's output.
    gated: bool = False
    norm_offset: bool = False  # Whether norms add 1 to their weights and round once.
    delta: DeltaConfig | None = None
    experts: ExpertsConfig | None = None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the layer's experts, or None for a dense layer."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def rotated(self) -> int:
        return self.rotary_dim or self.head_dim

    def is_delta(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers

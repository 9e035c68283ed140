"""Describes a text decoder as plain data, which is read without torch."""

from dataclasses import dataclass

from mmengine.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The feed-forward networks in some layers: `count` SwiGLU experts.

    A token uses the `top_k` likeliest experts and adds their outputs, weighted by the router's probabilities:
    a softmax over all experts, in float32.
    """

    count: int
    top_k: int  # At most `count`.
    intermediate_size: int  # Of each expert.
    layers: tuple[int, ...]  # Layers with experts; the others are dense.
    norm_top_k: bool = True  # Divide the chosen probabilities by their sum.
    # Size of an additional expert for every token, scaled by the sigmoid of its own gate; 0: none.
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta net, which replaces attention (delta.py) in `layers`. `num_heads` counts value heads
    and is a multiple of `num_key_heads`.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4  # Of the convolution before the delta rule.

    @property
    def width(self) -> int:
        """Return the convolution's channels: those for q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Layers of attention and SwiGLU between RMS norms, all alike except for experts and for the layers in
    `delta`.

    `num_heads` is a multiple of `num_kv_heads`; `head_dim` is even. `intermediate_size` is 0 if no layer is
    dense.
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
    out_bias: bool = False  # On the attention output.
    mlp_bias: bool = False
    qk_norm: bool = False  # Each head of q and k is normed before rotation.
    tied: bool = False  # The head is the embedding.
    rotary_dim: int = 0  # Number of first values in a head that are rotated; 0: all.
    # A head's output is multiplied by the sigmoid of a gate, which q's projection writes after its q.
    gated: bool = False
    norm_offset: bool = False  # Norms add 1 to their weights and round once.
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

"""What a text decoder is: plain data, read without torch."""

from dataclasses import dataclass

from mmengine.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The feed-forward of some layers: of `count` SwiGLUs a token takes the `top_k` likeliest, and adds them
    up by their chances: the router's softmax over all of them, in float32."""

    count: int
    top_k: int  # up to `count`
    intermediate_size: int  # of each
    layers: tuple[int, ...]  # that have them; the others are dense
    norm_top_k: bool = True  # the chances that were taken are divided by their sum
    shared_size: int = 0  # of one more, for every token, times the sigmoid of a gate of its own; 0: none


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta net in place of attention (delta.py) in the layers that `layers` names. `num_heads`,
    those of values, is a multiple of `num_key_heads`."""

    layers: frozenset[int]
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4  # of the convolution before it

    @property
    def width(self) -> int:
        """Channels of the convolution: q's, k's and v's."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Layers of attention and SwiGLU between RMS norms, all alike but for experts, and for the mixers that
    `delta` names. `num_heads` is a multiple of `num_kv_heads`, `head_dim` even. `intermediate_size`: 0 where
    no layer is dense."""

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
    out_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of q and k has its norm before it is rotated
    tied: bool = False  # the head is the embedding
    rotary_dim: int = 0  # of a head, its first values are rotated; 0: all
    gated: bool = False  # a head's output is, by the sigmoid of what q's projection has behind its q
    norm_offset: bool = False  # 1 is added to the weights of norms, and what is normed is rounded once
    delta: DeltaConfig | None = None
    experts: ExpertsConfig | None = None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None: it is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def rotated(self) -> int:
        return self.rotary_dim or self.head_dim

    def is_delta(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers

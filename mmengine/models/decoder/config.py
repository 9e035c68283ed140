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
class DecoderConfig:
    """Layers of attention and SwiGLU between RMS norms, all alike but for experts. `num_heads` is a multiple
    of `num_kv_heads`, `head_dim` even. `intermediate_size`: 0 where no layer is dense."""

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
    experts: ExpertsConfig | None = None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None: it is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

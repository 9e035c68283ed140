"""What a text decoder is: plain data, read without torch."""

from dataclasses import dataclass

from mmengine.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Layers of attention and SwiGLU between RMS norms, all alike. `num_heads` is a multiple of
    `num_kv_heads`, `head_dim` even."""

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

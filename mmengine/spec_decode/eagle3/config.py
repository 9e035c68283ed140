"""The configuration of a draft head, for all families of published files."""

from dataclasses import dataclass
from typing import Literal

from mmengine.checkpoint.rope import RopeConfig

MAX_DRAFTS = 7


@dataclass(frozen=True, slots=True)
class Target:
    """The sizes of the model for which the head drafts tokens."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The configuration of a draft head.

    In the KV cache, the head's layers come after the target's layers, and may have other sizes.
    """

    family: str  # the architecture's name, or "speculators"
    hidden_size: int  # the head's hidden size, h in shapes
    target_hidden_size: int  # the target's hidden size, H in shapes
    embed_size: int  # size of a token embedding
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's vocabulary size
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # ascending; i means the input of layer i, see aux_layers.py
    rms_norm_eps: float
    rope: RopeConfig
    norm_before_fc: bool  # whether a single norm over all auxiliary states comes before fc
    fc_norm: bool  # whether a norm for each auxiliary state comes before fc
    norm_before_residual: bool  # whether the first layer's residual is the norm's output
    # Whether the next draft reads the final norm's output (True) or its input.
    norm_output: bool
    qk_norm: bool
    attention_bias: bool
    own_embedding: bool  # whether the head has its own embedding
    # The matrix for the logits: the head's LM head, the head's embedding, or the target's LM head.
    head: Literal["own", "embedding", "target"]
    num_drafts: int  # number of drafts per step (K)

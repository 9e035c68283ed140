"""A draft head's configuration, in the same fields for all file families."""

from dataclasses import dataclass
from typing import Literal

from mmengine.checkpoint.rope import RopeConfig

MAX_DRAFTS = 7


@dataclass(frozen=True, slots=True)
class Target:
    """The model that the head drafts for."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A draft head. Its layers follow the target's in the KV cache, and may have other sizes."""

    family: str  # the architecture, or "speculators"
    hidden_size: int  # h
    target_hidden_size: int  # H
    embed_size: int  # size of a token's embedding
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # L_in(i), ascending
    rms_norm_eps: float
    rope: RopeConfig
    norm_before_fc: bool  # one norm over all auxiliary states
    fc_norm: bool  # one norm per auxiliary state
    norm_before_residual: bool  # whether the first layer's residual is normed
    # whether the next draft gets the input of the output matrix, rather than the input of the final norm
    norm_output: bool
    qk_norm: bool
    attention_bias: bool
    own_embedding: bool  # False: the head uses the target's embedding
    head: Literal["own", "embedding", "target"]  # source of the output matrix
    num_drafts: int  # drafts in a chain (K)

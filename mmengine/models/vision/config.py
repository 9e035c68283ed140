"""Defines a vision tower's sizes and options as plain data. Does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A vision tower in which patches attend only to patches in the same frame. Patches have learned position
    embeddings.

    Mergers join merge_size x merge_size patches to an embedding for the text model. Pixels are uint8, and the
    tower scales them to [-1, 1].
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int  # Number of video frames in a patch.
    merge_size: int
    num_positions: int  # Number of learned position embeddings, which form a square.
    # The base for a rotary embedding, which is used in addition to the learned positions; None: no rotary
    # embedding.
    rope_theta: float | None
    norm_eps: float  # For all layer norms.
    gelu: str  # The argument `approximate` of F.gelu in the blocks; the mergers use the exact GELU.
    deepstack_layers: tuple[int, ...]  # Entry i is the block whose output goes to deepstack merger i.
    joined_qkv: bool = True  # Whether q, k and v are stored as one matrix instead of three.
    # Whether the patch embedding's kernel is stored with a temporal dimension.
    patches_have_time: bool = True
    linear_merger: bool = False  # Whether a merger has one matrix without bias instead of two layers.

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

"""Describes a vision tower as plain data, which is read without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Blocks with attention within a frame, over patches with learned positions.

    Mergers join merge_size x merge_size patches to an embedding for the text model. Pixels are uint8 and are
    scaled to -1 to 1.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int  # 1: each frame by itself.
    merge_size: int
    num_positions: int  # Learned position embeddings, in a square.
    # Base of rotary positions beside the learned positions; None: no rotary positions.
    rope_theta: float | None
    norm_eps: float  # In every layer norm.
    gelu: str  # `approximate` of F.gelu in the blocks; the mergers use the exact form.
    deepstack_layers: tuple[int, ...]  # Blocks whose output is used; item i belongs to deepstack merger i.
    joined_qkv: bool = True  # Stored as one matrix; otherwise as three.
    # False: the patch embedding's kernel is stored without the temporal dimension.
    patches_have_time: bool = True
    linear_merger: bool = False  # One matrix without bias after the norm; otherwise two layers.

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

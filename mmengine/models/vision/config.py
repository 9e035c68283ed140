"""What a vision tower is: plain data, read without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Blocks of attention within a frame, over patches with learned positions, and mergers that join
    merge_size x merge_size patches into an embedding of the text model. Pixels come to it as uint8, and are
    brought to -1 to 1."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int  # 1: each frame by itself
    merge_size: int
    num_positions: int  # learned position embeddings, a square
    rope_theta: float | None  # of rotary positions beside the learned ones; None: there are none
    norm_eps: float  # of every layer norm
    gelu: str  # `approximate` of F.gelu in the blocks; the mergers' is exact
    deepstack_layers: tuple[int, ...]  # blocks tapped; item i belongs to deepstack merger i
    joined_qkv: bool = True  # stored as one matrix; else as three
    patches_have_time: bool = True  # False: the kernel of patches is stored without that dimension
    linear_merger: bool = False  # one matrix without a bias behind its norm; else two layers

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

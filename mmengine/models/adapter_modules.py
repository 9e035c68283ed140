"""Lists the modules that LoRA adapters may change: linear layers in attention, dense MLPs, delta nets and the
vision tower. Does not import torch.
"""

import re

from mmengine.models.config import NetworkConfig
from mmengine.models.decoder.tensors import decoder_tensors
from mmengine.models.vision.tensors import vision_tensors

_TEXT = re.compile(
    r"text\.layers\.\d+\.(?:self_attn\.[qkvo]_proj|linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(?:gate|up|down)_proj)\.weight"
)
_VISION = re.compile(r"visual\.(?!pos_embed|patch_embed)[\w.]+\.weight")


def adapter_modules(config: NetworkConfig) -> dict[str, tuple[int, int]]:
    """Return canonical name -> weight shape (out, in) for each module that adapters may change."""
    shapes = {name: shape for name, shape in decoder_tensors(config.text).items() if _TEXT.fullmatch(name)}
    if config.vision is not None:
        shapes |= {
            name: shape
            for name, shape in vision_tensors(config.vision).items()
            if _VISION.fullmatch(name) and len(shape) == 2
        }
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items()}

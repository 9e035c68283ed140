"""Maps tensor names in SmolVLM checkpoints to canonical names."""

import re

from mmengine.checkpoint.names import TensorNames

_VISION, _LAYER = r"(?:model\.)?vision_model\.", r"(?:model\.)?vision_model\.encoder\.layers\.(\d+)\."
_BEGINNINGS = (
    (rf"{_LAYER}self_attn\.([qkv])_proj\.", r"visual.blocks.\1.attn.\2."),
    (rf"{_LAYER}self_attn\.out_proj\.", r"visual.blocks.\1.attn.proj."),
    (rf"{_LAYER}layer_norm([12])\.", r"visual.blocks.\1.norm\2."),
    (rf"{_LAYER}mlp\.fc([12])\.", r"visual.blocks.\1.mlp.linear_fc\2."),
    (rf"{_VISION}embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (rf"{_VISION}embeddings\.position_embedding\.", "visual.pos_embed."),
    (rf"{_VISION}post_layernorm\.", "visual.merger.norm."),
    (r"(?:model\.)?connector\.modality_projection\.proj\.", "visual.merger.linear."),
    (r"(?:model\.)?text_model\.", "text."),
)
NAMES = TensorNames(tuple((re.compile(pattern), beginning) for pattern, beginning in _BEGINNINGS))

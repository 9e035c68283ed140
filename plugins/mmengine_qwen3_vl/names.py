"""Maps the tensor names in checkpoints from transformers 4.5x and 5 to canonical names."""

import re

from mmengine.checkpoint.names import TensorNames

NAMES = TensorNames(
    (
        (re.compile(r"(?:model\.)?visual\."), "visual."),
        (re.compile(r"(?:language_model\.|model\.)?lm_head\."), "lm_head."),
        (re.compile(r"(?:model\.language_model\.|language_model\.(?:model\.)?|model\.)"), "text."),
    )
)

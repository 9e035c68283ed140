"""Names of tensors in the wild: transformers 4.5x, 5, and files cut from either."""

import re

from mmengine.checkpoint.names import TensorNames

NAMES = TensorNames(
    (
        (re.compile(r"(?:model\.)?visual\."), "visual."),
        (re.compile(r"(?:language_model\.|model\.)?lm_head\."), "lm_head."),
        (re.compile(r"(?:model\.language_model\.|language_model\.(?:model\.)?|model\.)"), "text."),
    )
)

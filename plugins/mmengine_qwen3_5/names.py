"""Maps the tensor names in published Qwen3.5 files to canonical names. The draft head in these files (`mtp.`)
is read separately (models/mtp).
"""

import re
from dataclasses import dataclass

from mmengine.checkpoint.names import TensorNames
from mmengine.models.mtp.files import is_mtp


@dataclass(frozen=True, slots=True)
class Names(TensorNames):
    def canonical(self, stored: str) -> str | None:
        return None if is_mtp(stored) else TensorNames.canonical(self, stored)


NAMES = Names(
    (
        (re.compile(r"(?:model\.)?visual\."), "visual."),
        (re.compile(r"(?:language_model\.|model\.)?lm_head\."), "lm_head."),
        (re.compile(r"(?:model\.language_model\.|language_model\.(?:model\.)?|model\.)"), "text."),
    )
)

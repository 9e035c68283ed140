"""The names of a model's tensors: those in files, which differ by who wrote them, to one set."""

import re
from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.model_files import model_tensors
from mmengine.checkpoint.tensors import TensorEntry

_DERIVED = re.compile(r"rotary(?:_pos)?_emb\.inv_freq$")  # old files store this constant


@dataclass(frozen=True, slots=True)
class TensorNames:
    """`beginnings`: what a stored name may begin with, and what stands there in the canonical one (`text.`,
    `visual.`, `lm_head.`), groups of the pattern among it. The first that fits counts; a name that none fits
    stays as it is."""

    beginnings: tuple[tuple[re.Pattern[str], str], ...]

    def canonical(self, stored: str) -> str | None:
        """None for constants that are derived anyway."""
        if _DERIVED.search(stored):
            return None
        for pattern, beginning in self.beginnings:
            if found := pattern.match(stored):
                return found.expand(beginning) + stored[found.end() :]
        return stored

    def entries(self, folder: Path) -> dict[str, TensorEntry]:
        """Every tensor of the weights in a folder or a GGUF file by its canonical name. ModelError as of
        `open_tensors`."""
        return dict(model_tensors(folder, self.canonical))

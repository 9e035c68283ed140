"""Maps tensor names in files to canonical names, because programs name the same tensor differently."""

import re
from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.model_files import model_tensors
from mmengine.checkpoint.tensors import TensorEntry

_DERIVED = re.compile(r"rotary(?:_pos)?_emb\.inv_freq$")  # A constant that old files store.


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Rules that map stored names to canonical names.

    `beginnings`: pairs (pattern, replacement). The first pattern that matches a stored name's beginning
    applies. Its replacement, such as `text.` or `lm_head.`, replaces the matched text. A replacement may use
    the pattern's groups. A name without a match stays unchanged.
    """

    beginnings: tuple[tuple[re.Pattern[str], str], ...]

    def canonical(self, stored: str) -> str | None:
        """Return the canonical name, or None for a constant that the model computes itself."""
        if _DERIVED.search(stored):
            return None
        for pattern, beginning in self.beginnings:
            if found := pattern.match(stored):
                return found.expand(beginning) + stored[found.end() :]
        return stored

    def entries(self, folder: Path) -> dict[str, TensorEntry]:
        """Return every tensor of a folder or a GGUF file by its canonical name. Raises ModelError."""
        return dict(model_tensors(folder, self.canonical))

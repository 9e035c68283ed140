"""A tokenizer of 150,000 byte pairs, made offline from the file that the package mistral-common holds.

Its ids are those of that family: 1,000 special tokens first, then the byte pairs by rank.
"""

import base64
import json
import sys
from functools import lru_cache
from importlib import util
from pathlib import Path

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

FILE = "tekken_240911.json"  # the one with the most tokens
EOS = 2
MISSING = f"""no vocabulary: put mistral-common (a wheel of 7 MB) into a folder of its own, for beside
transformers it would want its dependencies, and name its file:
    pip install --no-deps mistral-common --target FOLDER
    --vocabulary FOLDER/mistral_common/data/{FILE}"""


class Vocabulary:
    """`tokens`: the bytes of each id, b"" for those that no text holds."""

    def __init__(self, path: Path):
        found = json.loads(path.read_bytes())
        ranked = [base64.b64decode(entry["token_bytes"]) for entry in found["vocab"]]
        self.num_special = found["config"]["default_num_special_tokens"]
        self.tokens = [b""] * self.num_special + ranked
        self.special = [f"<special_{number}>" for number in range(self.num_special)]
        self._ranks = {token: rank for rank, token in enumerate(ranked)}
        self._known = lru_cache(65_536)(self._spelled)
        self._split = Split(Regex(found["config"]["pattern"]), "isolated")

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Its canonical tokens. llguidance asks for those of every text that a grammar forces: known ones
        are kept, so that it is not the speed of this class that is measured."""
        return list(self._known(text))

    def _spelled(self, text: str) -> list[int]:
        words = (word.encode() for word, _ in self._split.pre_tokenize_str(text))
        return [self.num_special + rank for word in words for rank in self._ranks_of(word)]

    def _ranks_of(self, word: bytes) -> list[int]:
        """Byte-pair encoding: whichever neighbours make the lowest token are joined first."""
        if word in self._ranks:
            return [self._ranks[word]]
        parts = [bytes([byte]) for byte in word]
        while len(parts) > 1:
            pairs = [left + right for left, right in zip(parts, parts[1:], strict=False)]
            known = [(self._ranks[pair], at) for at, pair in enumerate(pairs) if pair in self._ranks]
            if not known:
                break
            _, at = min(known)
            parts[at : at + 2] = [pairs[at]]
        return [self._ranks[part] for part in parts]


def find(given: Path | None) -> Path:
    """The file that is given, or that of an installed mistral-common; ends the process, saying what to
    do, where there is none."""
    if given is not None:
        return given
    spec = util.find_spec("mistral_common")
    path = Path(spec.origin).parent / "data" / FILE if spec is not None and spec.origin else None
    if path is None or not path.exists():
        sys.exit(MISSING)
    return path

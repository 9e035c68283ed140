"""Tokenizers with about 150,000 byte-pair tokens, made offline from a file.

tekken_240911.json    in the package mistral-common: 1,000 special tokens, then byte pairs by rank
ggml-vocab-qwen2.gguf  from llama.cpp's models/: the vocabulary that Qwen2 to Qwen3-VL share; `make test`
                      fetches it into build/vocabularies
"""

import base64
import json
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Protocol

from llguidance import LLTokenizer
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split

from mmengine.checkpoint.gguf.model import GGUFModel

FILE = "tekken_240911.json"  # mistral-common's file with the most tokens
MISSING = f"""no vocabulary: install mistral-common (a wheel of 7 MB) into a separate folder, since next to
transformers it would require its dependencies, and name its file:
    pip install --no-deps mistral-common --target FOLDER
    --vocabulary FOLDER/mistral_common/data/{FILE}
or a .gguf file with a byte-pair vocabulary"""


class Vocabulary(Protocol):
    """A vocabulary. `tokens`: each id's bytes, b"" for a token without text. `special_ids`: ids that `encode`
    never returns.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos: int

    def __len__(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Return the text's canonical tokens. llguidance calls this method for every text that a grammar
        forces. Tekken and Gguf cache the tokens, so the measurements exclude most encoding time.
        """


@dataclass(slots=True)
class Bytes:
    """The 256 bytes and an end token."""

    tokens: list[bytes] = field(default_factory=lambda: [*(bytes([byte]) for byte in range(256)), b""])
    special_ids: list[int] = field(default_factory=lambda: [256])
    eos: int = 256

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Tekken:
    def __init__(self, path: Path):
        found = json.loads(path.read_bytes())
        ranked = [base64.b64decode(entry["token_bytes"]) for entry in found["vocab"]]
        num_special = found["config"]["default_num_special_tokens"]
        self.tokens = [b""] * num_special + ranked
        self.special_ids, self.eos = list(range(num_special)), 2
        self._ranks = {token: rank for rank, token in enumerate(ranked)}
        self._known = lru_cache(65_536)(self._spelled)
        self._split = Split(Regex(found["config"]["pattern"]), "isolated")

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        return list(self._known(text))

    def _spelled(self, text: str) -> list[int]:
        words = (word.encode() for word, _ in self._split.pre_tokenize_str(text))
        return [len(self.special_ids) + rank for word in words for rank in self._ranks_of(word)]

    def _ranks_of(self, word: bytes) -> list[int]:
        """Return the ranks of the word's byte-pair tokens. The adjacent pair with the lowest rank is merged
        first.
        """
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


class Gguf:
    """The vocabulary of a .gguf file. `special_ids` also has the ids without a token."""

    def __init__(self, path: Path):
        model = GGUFModel(path)
        found, (self.eos, *_) = (
            model.file("tokenizer.json"),
            model.file("generation_config.json")["eos_token_id"],
        )
        self._tokenizer = Tokenizer.from_str(json.dumps(found))
        self._tokenizer.encode_special_tokens = True  # special tokens in a text are encoded as plain text
        added = {token["id"] for token in found["added_tokens"]}
        byte_of = {char: byte for byte, char in _byte_level_characters().items()}
        self.tokens = [b""] * model.file("config.json")["vocab_size"]
        for name, token in found["model"]["vocab"].items():
            if token not in added:
                self.tokens[token] = bytes(byte_of[char] for char in name)
        self.special_ids = [token for token, spelled in enumerate(self.tokens) if not spelled]
        self._known = lru_cache(65_536)(
            lambda text: self._tokenizer.encode(text, add_special_tokens=False).ids
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        return list(self._known(text))


def _byte_level_characters() -> dict[int, str]:
    """Return the character for each byte in a byte-level vocabulary (GPT-2's encoder.py). Printable bytes
    keep their character; the other bytes get code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


class _Tokens:
    """The tokenizer attributes that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_ids
        self.eos_token_id, self._encode = vocabulary.eos, vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(_Tokens(vocabulary), n_vocab=len(vocabulary), eos_token=[vocabulary.eos])


def load(path: Path) -> Vocabulary:
    return Gguf(path) if path.suffix == ".gguf" else Tekken(path)


def find(given: Path | None) -> Path:
    """Return `given`, or else the file in an installed mistral-common. Without a file, exit with
    instructions.
    """
    if given is not None:
        return given
    spec = util.find_spec("mistral_common")
    path = Path(spec.origin).parent / "data" / FILE if spec is not None and spec.origin else None
    if path is None or not path.exists():
        sys.exit(MISSING)
    return path

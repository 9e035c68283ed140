"""A chat model's tokenizer, which never encodes a user's text as special tokens. Also counts tokens up to a
limit.

Two copies of the tokenizer are loaded: the first knows the special tokens, and the second reads special
tokens as ordinary text.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path

import tokenizers

from mmengine.checkpoint.model_files import model_file, read_model_json
from mmengine.errors import ModelError
from mmengine.processing.chat.tokenizer_builder import (
    build_tokenizer,
    check_tokenizer,
    panics_refused,
    twin_of,
)
from mmengine.request import check_unicode

SHORT_CHARS = 16  # Texts up to this length are cached, because templates repeat short texts.
NUM_SHORT = 1024  # Maximum number of cached texts.


class ChatTokenizer:
    """Implements mmengine.models.plugin.Tokenizer. Thread-safe.

    `special`: text -> id for each special token. Added tokens that the file does not mark as special, such as
    <think>, are not included, because a user's text is allowed to become these tokens. `marked`: `special`,
    and media placeholders without a token in the vocabulary. These placeholders have negative ids, which no
    finished prompt contains.
    """

    def __init__(self, data: dict, origin: object, placeholders: Sequence[str] = ()) -> None:
        """Build the tokenizer. `data`: the contents of tokenizer.json. `origin`: the data's source, for error
        messages. `placeholders`: media placeholders for `marked`. Raises ModelError.
        """
        try:
            added = data.get("added_tokens") or []
            check_tokenizer(data)
            text = json.dumps(data, sort_keys=True)
            self._full = build_tokenizer(text)
            self._plain = twin_of(self._full) or build_tokenizer(text)
            # With this option, the tokenizer encodes special tokens as ordinary text.
            self._plain.encode_special_tokens = True
            self.special = {token["content"]: int(token["id"]) for token in added if token["special"]}
            self._added = {int(token["id"]): token["content"] for token in added}
            self._joins_bytes = (data.get("decoder") or {}).get("type") == "ByteLevel"
        except Exception as error:  # tokenizers raises a bare Exception for a damaged file.
            raise ModelError(f"{origin} is not a readable tokenizer") from error
        ordinary = _entries(data["model"], self._plain)
        self._check(data, added, ordinary, origin)
        self._short = lru_cache(NUM_SHORT)(partial(self._encode, self._plain))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.special_ids = frozenset(self.special.values())
        self.marked = {name: -1 - place for place, name in enumerate(placeholders)} | self.special
        ids = max(ordinary.values(), default=-1), max(self._full.get_added_tokens_decoder(), default=-1)
        self.vocab_size = 1 + max(ids)
        names = sorted(self.marked, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    @classmethod
    def of_folder(cls, folder: Path, placeholders: Sequence[str] = ()) -> "ChatTokenizer":
        """Load the tokenizer of a model's folder or GGUF file."""
        name = "tokenizer.json"
        return cls(read_model_json(folder, name), model_file(folder, name), placeholders)

    def _check(self, data: dict, added: list[dict], ordinary: dict[str, int], origin: object) -> None:
        if not self.special:
            raise ModelError(f"{origin} names no special tokens; a chat model has some")
        bytes_of = _SPELLED if self._joins_bytes else _FALLBACKS
        knows_all = bytes_of <= ordinary.keys() and (self._joins_bytes or data["model"].get("byte_fallback"))
        if _reached(self.special.keys() & ordinary.keys(), data["model"], knows_all):
            raise ModelError(f"{origin}: a special token is also an ordinary one, so text could become it")
        for token in added:
            if token["special"] and any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
                raise ModelError(
                    f"{origin}: {token['content']!r} strips the text next to it, which is not supported"
                )

    @cached_property
    def text_prefix(self) -> tuple[int, ...]:
        """Return the tokens that the post-processor puts before a text, such as BOS."""
        with panics_refused():
            bare, framed = (self._full.encode("a", add_special_tokens=framed).ids for framed in (False, True))
        places = range(len(framed) - len(bare) + 1)
        return tuple(framed[: next((i for i in places if framed[i : i + len(bare)] == bare), 0)])

    @cached_property
    def text_suffix(self) -> tuple[int, ...]:
        """Return the tokens that the post-processor puts after a text, such as an end marker."""
        with panics_refused():
            bare, framed = (self._full.encode("a", add_special_tokens=framed).ids for framed in (False, True))
        return tuple(framed[len(self.text_prefix) + len(bare) :])

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of a text. Without `allow_special`, special tokens are encoded as ordinary
        text.
        """
        if allow_special:
            return self._encode(self._full, text)
        return list(self._short(text)) if len(text) <= SHORT_CHARS else self._encode(self._plain, text)

    @staticmethod
    def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        check_unicode((), text)
        with panics_refused():
            return tokenizer.encode(text, add_special_tokens=False).ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a long text has more than `limit` tokens, with special tokens read as text. The time
        depends on `limit`, not on the text's length.
        """
        with panics_refused():
            return exceeds(self._plain, text, limit)

    def split(self, text: str, max_special: int = 0) -> list[str | int]:
        """Return a text's `marked` tokens as ids, and the texts between these tokens, in order. The text
        after the first `max_special` marked tokens (0: no limit) is not split.
        """
        check_unicode(("prompt",), text)
        pieces = self._special_pattern.split(text, max_special)
        return [self.marked[piece] if i % 2 else piece for i, piece in enumerate(pieces) if piece]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with panics_refused():
            return self._full.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def text_bytes(self) -> list[bytes] | None:
        """Return the bytes that each id adds to a decoded text. Returns None if decoding does more than join
        bytes.
        """
        try:
            found = self.token_bytes() if self._joins_bytes else None
        except ModelError:
            return None
        if found is None or any(self._full.decode([token]) != text for token, text in self._shown.items()):
            return None
        for token in self.special_ids:
            found[token] = b""
        return found

    @property
    def _shown(self) -> dict[int, str]:
        """Return the added tokens that are not special, by id. A byte-level decoder may misread these tokens'
        texts as spelled bytes.
        """
        return {token: text for token, text in self._added.items() if token not in self.special_ids}

    def token_bytes(self) -> list[bytes]:
        """Return each token's bytes. The vocabulary spells each byte as a character."""
        found = [b""] * self.vocab_size
        try:
            for spelling, token in self._plain.get_vocab(with_added_tokens=False).items():
                found[token] = spelling.translate(_BYTE_OF).encode("latin-1")
        except UnicodeEncodeError:
            raise ModelError("this tokenizer's tokens are not bytes, so no grammar can be followed") from None
        for token, content in self._added.items():
            found[token] = content.encode()
        return found


# Code point -> byte in byte-level BPE (Radford et al., GPT-2, 2019). A byte that is printable in Latin-1 is
# spelled as itself; any other byte is spelled as a code point from 256 on. Latin-1 characters that spell no
# byte map to 65535, which cannot be encoded in Latin-1.
_PRINTS = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTS]
_BYTE_OF = dict.fromkeys(_OTHERS, 65535) | {256 + place: byte for place, byte in enumerate(_OTHERS)}
_SPELLED = {chr(point) for point in (*_PRINTS, *range(256, 256 + len(_OTHERS)))}
_FALLBACKS = {f"<0x{byte:02X}>" for byte in range(256)}


def _reached(names: set[str], model: dict, knows_all: bool) -> bool:
    """Return whether ordinary text can be encoded as any of these tokens.

    BPE produces a token with several characters only by a merge, or as the unknown token. `knows_all`:
    whether each byte has a token, so that the unknown token never occurs.
    """
    if not names:
        return False
    if model.get("type") != "BPE" or model.get("ignore_merges"):
        return True
    if model.get("unk_token") in names and not knows_all:
        return True
    merged = {"".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]}
    return any(len(name) == 1 or name in merged for name in names)


def _entries(model: dict, tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Return a vocabulary without its added tokens. Reads the JSON data if possible, because `get_vocab` is
    slow.
    """
    named = model.get("type") == "BPE" and isinstance(model["vocab"], dict)
    return model["vocab"] if named else tokenizer.get_vocab(with_added_tokens=False)


SLICE_CHARS = 2**15
SURE_CHARS = 4  # A text with at most this many characters per allowed token is not counted.
_MARGIN = 2**10  # Number of characters at a slice's end whose tokens may depend on the following text.
_AGREE = 4  # Number of tokens after a cut that must be equal in both slices.
_CUTS = 32  # Maximum number of cuts that are tried per slice.


def exceeds(tokenizer: tokenizers.Tokenizer, text: str, limit: int) -> bool:
    """Return whether `text` has more than `limit` tokens. Tokenizes slices until the limit is passed.

    For a short text the result is False without counting, because the caller tokenizes the text anyway.

    A slice is cut at a token's end, well before the slice's last character. The cut is exact if the next
    slice begins with the tokens that follow the cut in this slice. The reason: whether byte-level BPE joins
    two tokens depends only on these two tokens (van Antwerpen and Neubeck, "So many tokens, so little time",
    2024). If no cut is exact, half of the slice's tokens are counted. This happens only in crafted text.
    """
    if len(text) <= max(SLICE_CHARS, SURE_CHARS * limit):
        return False
    count = start = 0
    while count <= limit and start + SLICE_CHARS < len(text):
        tokens, length = _slice(tokenizer, text, start)
        count += tokens
        start += length
    return count > limit


def _slice(tokenizer: tokenizers.Tokenizer, text: str, start: int) -> tuple[int, int]:
    """Return the numbers of tokens and characters from `start` to the slice's cut."""
    encoding = tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
    ids = encoding.ids
    for place, end in _ends(encoding.offsets):
        behind = text[start + end : start + end + _MARGIN]
        again = tokenizer.encode(behind, add_special_tokens=False).ids
        if again[:_AGREE] == ids[place : place + _AGREE]:
            return place, end
    return len(ids) // 2, SLICE_CHARS


def _ends(offsets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield possible cuts as (token index, character index), last first. At a cut, a token begins exactly
    where the previous token ends.
    """
    place, found = len(offsets), 0
    while place > 1 and found < _CUTS:
        place -= 1
        end = offsets[place][0]
        if end <= SLICE_CHARS - _MARGIN and offsets[place - 1][1] == end:
            found += 1
            yield place, end

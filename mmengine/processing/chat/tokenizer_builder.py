"""Checks an untrusted tokenizer.json, builds tokenizers from the file, and turns panics of the Rust library
`tokenizers` into errors.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers

from mmengine.errors import InvalidRequest

MAX_GROWTH = 1024  # Maximum factor by which normalizing or decoding may lengthen a text.


def check_tokenizer(data: dict) -> None:
    """Raise ValueError for data that would make tokenizers panic, or lengthen texts without limit."""
    model = data["model"]
    prefix = str(model.get("continuing_subword_prefix") or "")
    pairs = model.get("merges", ()) if prefix and model.get("type") == "BPE" else ()
    # The library cannot join a merge whose second part lacks the prefix.
    if any(not (pair.split(" ") if isinstance(pair, str) else pair)[1].startswith(prefix) for pair in pairs):
        raise ValueError("a merge's second part lacks the continuing_subword_prefix")
    for part in ("normalizer", "decoder"):
        if _growth(data.get(part)) > MAX_GROWTH:
            raise ValueError(f"the {part} lengthens a text more than {MAX_GROWTH} times")


def _growth(part: object) -> float:
    """Return the factor by which a normalizer or a decoder may lengthen a text."""
    if not isinstance(part, dict):
        return 1.0
    factor = 1.0
    for each in (*(part.get("normalizers") or ()), *(part.get("decoders") or ())):
        factor *= _growth(each)
    match part.get("type"):
        case "Replace":
            pattern = part["pattern"]
            # A regular expression may match the empty text before each character.
            fewest = len(pattern["String"]) if "String" in pattern else 0
            added = len(part["content"])
            factor *= added + 1 if not fewest else max(1.0, added / fewest)
        case "Prepend":
            factor *= 1 + len(part["prepend"])
        case "Precompiled":
            data = base64.b64decode(part["precompiled_charsmap"] or "")
            texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            factor *= max(map(len, texts), default=1) or 1
    return factor


def build_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Return the tokenizer for the text in a tokenizer.json. Raises Exception for a damaged file."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise ValueError(f"tokenizers failed: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def panics_refused() -> Iterator[None]:
    """Raise InvalidRequest if `tokenizers` panics on a text, for example because a regular expression is too
    slow.
    """
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        why = str(error).partition("\n")[0][:200]
        raise InvalidRequest(f"the model's tokenizer fails on this text ({why}); send another text") from None


def _is_panic(error: BaseException) -> bool:
    """Return whether Rust code panicked. A panic raises a BaseException whose class no module exports."""
    return type(error).__name__ == "PanicException"


def twin_of(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """Return a second tokenizer, or None if the added tokens would differ. Both tokenizers share the memory
    for the vocabulary and the merges.
    """
    twin = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(twin, part, value)
    added = tokenizer.get_added_tokens_decoder()
    for token in sorted(added):
        (twin.add_special_tokens if added[token].special else twin.add_tokens)([added[token]])
    found = twin.get_added_tokens_decoder()
    same = {token: _fields(value) for token, value in found.items()}
    return twin if same == {token: _fields(value) for token, value in added.items()} else None


def _fields(token: tokenizers.AddedToken) -> tuple[object, ...]:
    names = ("content", "special", "normalized", "lstrip", "rstrip", "single_word")
    return tuple(getattr(token, name) for name in names)

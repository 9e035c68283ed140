"""Converts text to tokens with exactly the text's bytes, even if the tokenizer would normalize the text.

A grammar forces exact bytes, but Qwen's tokenizers first apply Unicode's NFC: U+2126 (ohm sign) becomes
U+03A9 (omega). Other tokenizers change the case, remove spaces, or add a space. Characters that a tokenizer
would change are encoded as single-byte tokens.
"""

import unicodedata
from collections.abc import Callable, Sequence


class ExactEncoder:
    """Encodes text to tokens. An instance can be called like the tokenizer's `encode`.

    `token_bytes`: every token's bytes, b"" for a special token. If the vocabulary lacks a single-byte token,
    an instance returns the tokenizer's tokens unchanged.
    """

    def __init__(self, encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]):
        self._encode, self._token_bytes = encode, token_bytes
        self._letters = {each[0]: token for token, each in enumerate(token_bytes) if len(each) == 1}

    def __call__(self, text: str) -> list[int]:
        tokens = self._encode(text)
        if self._spells(tokens, text) or len(self._letters) < 256:
            return tokens
        out, exact = list[int](), ""
        for cluster in clusters(text):
            if self._spells(self._encode(cluster), cluster):
                exact += cluster
                continue
            out += self._run(exact)
            out += [self._letters[byte] for byte in cluster.encode()]
            exact = ""
        return out + self._run(exact)

    def _run(self, text: str) -> list[int]:
        """Return the tokenizer's tokens for `text` if these spell the text, otherwise single-byte tokens."""
        tokens = self._encode(text) if text else []
        return tokens if self._spells(tokens, text) else [self._letters[byte] for byte in text.encode()]

    def _spells(self, tokens: Sequence[int], text: str) -> bool:
        known = self._token_bytes
        return b"".join(known[token] for token in tokens if token < len(known)) == text.encode()


def clusters(text: str) -> list[str]:
    """Split a text into clusters, which are character sequences that NFC normalizes independently.

    If the text grows, only its last cluster may change.
    """
    out: list[str] = []
    for char in text:
        if out and (unicodedata.combining(char) or _compose(out[-1], char)):
            out[-1] += char
        else:
            out.append(char)
    return out


def _compose(before: str, char: str) -> bool:
    """Return whether NFC joins a character with the previous one, as it joins Hangul letters."""
    if char.isascii():
        return False
    last = before[-1]
    nfc = unicodedata.normalize
    return nfc("NFC", before + char) != nfc("NFC", before) + nfc("NFC", char) or (
        nfc("NFC", last + char) != nfc("NFC", last) + nfc("NFC", char)
    )

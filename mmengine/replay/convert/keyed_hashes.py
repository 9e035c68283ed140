"""Keyed hashes that replace the tokens, names and texts in a redacted log."""

import hashlib

import numpy as np

# Texts that the engine itself writes. All other texts may be user content.
_WORDS = frozenset(
    {
        *("", "eos", "token", "string", "grammar", "closed", "cut"),
        *("cancelled", "deadline", "crash"),
        *("stop", "length", "repetition", "pooled", "abort", "error", "rejected", "recompute", "swap"),
        *("no free blocks", "the step failed", "the prefix cache was reset"),
        *("incomplete", "pause", "encoder cache reset", "connector"),
    }
)
REDACTED = "redacted"


class KeyedHashes:
    """Keyed hashes for the values in a log. Equal values of different kinds have different hashes."""

    def __init__(self, key: bytes):
        self._key = hashlib.blake2b(key, digest_size=64, person=b"mmengine-redact").digest()

    def of(self, kind: bytes, value: bytes, size: int = 32) -> bytes:
        return hashlib.blake2b(value, key=self._key, person=kind, digest_size=size).digest()

    def name(self, name: str) -> str:
        return "r" + self.of(b"id", name.encode("utf-8", "surrogatepass"), 8).hex() if name else ""

    def salt(self, salt: str) -> str:
        return self.of(b"salt", salt.encode("utf-8", "surrogatepass"), 16).hex() if salt else ""

    def text(self, text: str) -> str:
        return text if text in _WORDS else REDACTED

    def prints(self, fingerprints: dict[str, str]) -> dict[str, str]:
        """Return the fingerprints with hashed values."""
        return {
            name: self.of(b"print", f"{name}={value}".encode("utf-8", "surrogatepass"), 16).hex()
            for name, value in fingerprints.items()
        }

    def chain(
        self, state: bytes, tokens: np.ndarray, keep: int, marks: dict[int, bytes] | None = None
    ) -> tuple[np.ndarray, bytes]:
        """Return the redacted tokens, int32, and the hash state after the first `keep` tokens.

        `state`: the hash state before the tokens. `tokens`: int32. `marks`: maps a token's index to the media
        that begin at this token.
        """
        numbers, kept = np.empty(len(tokens), np.int32), state
        key, blake2b, data = self._key, hashlib.blake2b, tokens.astype("<i4").tobytes()
        for place in range(len(tokens)):
            value = blake2b(state + data[4 * place : 4 * place + 4], key=key, digest_size=20).digest()
            numbers[place] = int.from_bytes(value[16:], "little") & 0x7FFFFFFF
            state = value[:16]
            if marks and place in marks:
                state = blake2b(state + marks[place], key=key, person=b"media", digest_size=16).digest()
            if place + 1 == keep:
                kept = state
        return numbers, kept

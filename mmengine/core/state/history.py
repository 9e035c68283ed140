"""A digest over all prompt and output tokens, in order."""

import hashlib


class History:
    """A chained 16-byte BLAKE2b digest: each piece is hashed together with the digest before it, so
    that a snapshot can hold it."""

    def __init__(self) -> None:
        self._digest = bytes(16)

    def update(self, piece: bytes) -> None:
        """Add a piece, such as the bytes of token ids."""
        self._digest = hashlib.blake2b(self._digest + piece, digest_size=16).digest()

    def digest(self) -> bytes:
        """Return the digest over all pieces so far."""
        return self._digest

    def restore(self, digest: bytes) -> None:
        """Continue from the digest in a snapshot."""
        self._digest = digest

"""A digest over all tokens that came in or out, in order."""

import hashlib

CHAINED_SINCE = 2  # decision version


class History:
    """Logs of decision version 1 are one long stream to BLAKE2b, whose inner state nobody can write
    down. In later ones each piece makes a new digest of 16 bytes from the one before, so that it fits
    into a snapshot."""

    def __init__(self) -> None:
        self._stream = hashlib.blake2b(digest_size=16)
        self._chain: bytes | None = None

    def begin(self, decision_version: int) -> None:
        """The log's rules are known; nothing was added yet."""
        if decision_version >= CHAINED_SINCE:
            self._chain = bytes(16)

    def update(self, piece: bytes) -> None:
        if self._chain is None:
            self._stream.update(piece)
        else:
            self._chain = hashlib.blake2b(self._chain + piece, digest_size=16).digest()

    def digest(self) -> bytes:
        return self._stream.digest() if self._chain is None else self._chain

    def saved(self) -> bytes:
        """What `restore` takes. Raises ValueError for a stream."""
        if self._chain is None:
            raise ValueError("the history of a log of decision version 1 cannot be saved")
        return self._chain

    def restore(self, saved: bytes) -> None:
        self._chain = saved

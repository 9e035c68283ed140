"""Writes and checks the header of a value in the block store. The header proves that the value is complete
and was stored under its key.

    magic "MMBS" | version u32 | length of the payload u64 | digest, 16 bytes      (little endian, 32 bytes)

The digest is BLAKE2b over the key and the payload.
"""

import hashlib
import struct

MAGIC, VERSION = b"MMBS", 1
_HEADER = struct.Struct("<4sIQ16s")
SEAL_BYTES = _HEADER.size


def digest_of(key: bytes, payload: memoryview) -> bytes:
    """Return a 16-byte digest over the key and the payload."""
    hasher = hashlib.blake2b(len(key).to_bytes(8, "little") + key, digest_size=16)
    hasher.update(payload)
    return hasher.digest()


def seal(key: bytes, payload: memoryview) -> memoryview:
    """Return the header that is stored before the payload."""
    return memoryview(_HEADER.pack(MAGIC, VERSION, payload.nbytes, digest_of(key, payload)))


def opened(key: bytes, value: memoryview) -> bytes | None:
    """Return the digest from the header, or None if the value is not valid for `key`.

    `value`: a header and the payload, in a buffer with the size that the caller expects.
    """
    magic, version, length, digest = _HEADER.unpack(value[:SEAL_BYTES])
    payload = value[SEAL_BYTES:]
    if (magic, version, length) != (MAGIC, VERSION, payload.nbytes) or digest_of(key, payload) != digest:
        return None
    return bytes(digest)

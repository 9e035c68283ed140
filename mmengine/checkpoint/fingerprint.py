"""Computes a fingerprint of a model's weights, so that different weights are not mistaken for each other.

Does not import torch, because processors need the encoder's fingerprint and must start fast.
"""

import hashlib
import json
from pathlib import Path

from mmengine.checkpoint.names import TensorNames

# Number of chunks that the fingerprint reads from a large tensor. It reads small tensors whole.
SAMPLE_CHUNKS = 16
SAMPLE_CHUNK_BYTES = 16 * 2**10


def fingerprint(folder: Path, names: TensorNames, *, prefix: str = "") -> str:
    """Return the SHA-256 (hex) of the tensors whose canonical name starts with `prefix`.

    The result does not depend on file names or on how tensors are divided among files.

    The hash covers the name, dtype, shape and bytes of each tensor. Tensors of up to 256 KiB are read whole.
    Of each larger tensor, 16 chunks of 16 KiB are read, spread evenly from the first to the last byte. For
    16 GB of weights about 0.1 GB is read. Any training step changes the hash; an edit of bytes between the
    chunks does not. Raises ModelError.
    """
    digest = hashlib.sha256(b"mmengine weights 1")
    entries = names.entries(folder)
    for name in sorted(name for name in entries if name.startswith(prefix)):
        for entry in (entries[name], *entries[name].companions):
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            with entry.path.open("rb", buffering=0) as file:
                for offset, length in _samples(entry.num_bytes):
                    file.seek(entry.start + offset)
                    digest.update(file.read(length))
    return digest.hexdigest()


def _samples(num_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, length) of each byte range that the fingerprint reads from a tensor."""
    if num_bytes <= SAMPLE_CHUNKS * SAMPLE_CHUNK_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - SAMPLE_CHUNK_BYTES
    return [(last * i // (SAMPLE_CHUNKS - 1), SAMPLE_CHUNK_BYTES) for i in range(SAMPLE_CHUNKS)]

"""The fingerprint of a folder's weights. No torch here: a processor needs that of the encoder, and it must
start fast."""

import hashlib
import json
from pathlib import Path

from mmengine.checkpoint.names import TensorNames

# Bytes of one tensor that a fingerprint reads: all of it, or spread chunks of a larger one.
SAMPLE_CHUNKS = 16
SAMPLE_CHUNK_BYTES = 16 * 2**10


def fingerprint(folder: Path, names: TensorNames, *, prefix: str = "") -> str:
    """SHA-256 (hex) of the weights under a canonical `prefix`; independent of shards and file names.

    It covers each tensor's name, dtype and shape, and its bytes: all of a tensor up to 256 KiB, of a
    larger one 16 chunks of 16 KiB spread evenly with both ends. So 16 GB take about 0.1 GB of reads.
    Any training step changes it; a change made by hand between the samples does not. ModelError.
    """
    digest = hashlib.sha256(b"mmengine weights 1")
    entries = names.entries(folder)
    for name in sorted(name for name in entries if name.startswith(prefix)):
        for entry in (entries[name], *entries[name].beside):
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            with entry.path.open("rb", buffering=0) as file:
                for offset, length in _samples(entry.num_bytes):
                    file.seek(entry.start + offset)
                    digest.update(file.read(length))
    return digest.hexdigest()


def _samples(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the bytes of a tensor that its fingerprint reads."""
    if num_bytes <= SAMPLE_CHUNKS * SAMPLE_CHUNK_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - SAMPLE_CHUNK_BYTES
    return [(last * i // (SAMPLE_CHUNKS - 1), SAMPLE_CHUNK_BYTES) for i in range(SAMPLE_CHUNKS)]

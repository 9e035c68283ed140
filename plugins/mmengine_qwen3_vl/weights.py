"""The names of a Qwen3-VL's tensors, and the fingerprint of its weights.

No torch here: the processor needs the vision tower's fingerprint, and it must start fast.
"""

import hashlib
import json
import re
from pathlib import Path

from mmengine.checkpoint.tensors import TensorEntry, open_tensors

# Bytes of one tensor that a fingerprint reads: all of it, or spread chunks of a larger one.
SAMPLE_CHUNKS = 16
SAMPLE_CHUNK_BYTES = 16 * 2**10

# Names in the wild (transformers 4.5x, 5, and files cut from either) to one set: text., visual., lm_head.
_PREFIXES = (
    (re.compile(r"^(?:model\.)?visual\."), "visual."),
    (re.compile(r"^(?:language_model\.|model\.)?lm_head\."), "lm_head."),
    (re.compile(r"^(?:model\.language_model\.|language_model\.(?:model\.)?|model\.)"), "text."),
)
_DERIVED = re.compile(r"rotary(?:_pos)?_emb\.inv_freq$")  # old files store this constant


def open_checkpoint(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder's weights by its canonical name (`text.…`, `visual.…`, `lm_head.…`).
    Raises ModelError as `open_tensors` does."""
    return open_tensors(folder, canonical_name)


def canonical_name(stored: str) -> str | None:
    """The name this plugin uses for a stored tensor; None for constants that are derived anyway."""
    if _DERIVED.search(stored):
        return None
    for pattern, prefix in _PREFIXES:
        if pattern.match(stored):
            return pattern.sub(prefix, stored, count=1)
    return stored


def fingerprint(folder: Path, *, prefix: str = "") -> str:
    """SHA-256 (hex) of the weights under a canonical `prefix`; independent of shards and file names.

    It covers each tensor's name, dtype and shape, and its bytes: all of a tensor up to 256 KiB, of a
    larger one 16 chunks of 16 KiB spread evenly with both ends. So 16 GB take about 0.1 GB of reads.
    Any training step changes it; a change made by hand between the samples does not.
    """
    digest = hashlib.sha256(b"mmengine weights 1")
    entries = open_checkpoint(folder)
    for name in sorted(name for name in entries if name.startswith(prefix)):
        entry = entries[name]
        digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        with entry.path.open("rb", buffering=0) as file:
            for offset, length in _samples(entry.num_bytes):
                file.seek(entry.start + offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def vision_fingerprint(folder: Path) -> str:
    """`fingerprint` of the vision tower alone: it goes into every mm_hash."""
    return fingerprint(folder, prefix="visual.")


def _samples(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the bytes of a tensor that its fingerprint reads."""
    if num_bytes <= SAMPLE_CHUNKS * SAMPLE_CHUNK_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - SAMPLE_CHUNK_BYTES
    return [(last * i // (SAMPLE_CHUNKS - 1), SAMPLE_CHUNK_BYTES) for i in range(SAMPLE_CHUNKS)]

"""The safetensors files of a model folder: what they hold, whether they are whole, their fingerprint.

No torch here: the processor needs the vision tower's fingerprint, and it must start fast. A folder
comes from anybody, so headers are bounded and every offset is checked against the file before a
byte of data is trusted. The format: 8 bytes header length, a JSON header of dtype, shape and
offsets, then the data (https://huggingface.co/docs/safetensors, "Format").
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.errors import ModelError
from mmengine.models.files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 * 2**20
MAX_SHARDS = 1000
MAX_NAME_CHARS = 300
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `start` is its byte offset in `path`."""

    path: Path
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def open_checkpoint(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder's weights by its canonical name (`text.…`, `visual.…`, `lm_head.…`).

    Raises ModelError when files are missing, cut short or damaged, when a tensor is stored twice, or
    when its dtype is none of float 16, 32, 64 and bfloat16 (so: quantized).
    """
    entries: dict[str, TensorEntry] = {}
    for path in _weight_files(folder):
        for entry in _read_header(path):
            name = canonical_name(entry.stored_name)
            if name is None:
                continue
            if name in entries:
                raise ModelError(f"{path} and {entries[name].path.name} both hold tensor {entry.stored_name}")
            entries[name] = entry
    if not entries:
        raise ModelError(f"the weights in {folder} hold no tensors")
    return entries


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


def check_tensors(
    folder: Path,
    entries: dict[str, TensorEntry],
    expected: dict[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> None:
    """ModelError naming the first tensor that is missing, misshapen, or that the model has no place for."""
    allowed_missing = frozenset(optional)
    for name, shape in expected.items():
        if name not in entries:
            if name in allowed_missing:
                continue
            raise ModelError(f"the weights in {folder} have no tensor {name}; the download is not whole")
        entry = entries[name]
        if entry.shape != shape:
            raise ModelError(
                f"{entry.path}: tensor {entry.stored_name} has shape {list(entry.shape)}; config.json "
                f"asks for {list(shape)}"
            )
    for name, entry in entries.items():
        if name not in expected:
            raise ModelError(
                f"{entry.path}: tensor {entry.stored_name} has no place in the model of config.json"
            )


def _samples(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the bytes of a tensor that its fingerprint reads."""
    if num_bytes <= SAMPLE_CHUNKS * SAMPLE_CHUNK_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - SAMPLE_CHUNK_BYTES
    return [(last * i // (SAMPLE_CHUNKS - 1), SAMPLE_CHUNK_BYTES) for i in range(SAMPLE_CHUNKS)]


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            raise ModelError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    if len(names) > MAX_SHARDS:
        raise ModelError(f"{index} names {len(names)} files; at most {MAX_SHARDS} are read")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name[:100]!r}, which is no safetensors file of this folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing, though {INDEX_FILE} names it; download it")
    return [folder / name for name in names]


def _read_header(path: Path) -> list[TensorEntry]:
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or 8 + header_bytes > file_bytes:
                if header_bytes > MAX_HEADER_BYTES:
                    raise ModelError(f"{path} is no safetensors file; download it again")
                raise ModelError(
                    f"{path} is cut short: it has {file_bytes} bytes, its header alone needs "
                    f"{8 + max(header_bytes, 2)}; download it again"
                )
            if header_bytes > MAX_HEADER_BYTES:
                raise ModelError(
                    f"{path} has a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read"
                )
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} has a damaged header; download it again") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a damaged header; download it again")
    header.pop("__metadata__", None)
    entries = [_entry(path, name, value, 8 + header_bytes) for name, value in header.items()]
    needed = max((entry.start + entry.num_bytes for entry in entries), default=8 + header_bytes)
    if needed > file_bytes:
        raise ModelError(f"{path} is cut short: it has {file_bytes} bytes of {needed}; download it again")
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        sound = isinstance(dtype, str) and all(type(x) is int and 0 <= x < 2**50 for x in numbers)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or len(shape) > 8 or len(name) > MAX_NAME_CHARS:
        raise ModelError(f"{path} describes tensor {name[:200]} wrongly; download it again")
    if dtype not in FLOAT_BYTES:
        raise ModelError(
            f"{path}: tensor {name} is stored as {dtype[:20]}; quantized weights are not supported"
        )
    if end - begin != math.prod(shape) * FLOAT_BYTES[dtype]:
        raise ModelError(
            f"{path}: tensor {name} has {end - begin} bytes, which its shape {shape} contradicts"
        )
    return TensorEntry(path, name, dtype, tuple(shape), data_start + begin, end - begin)

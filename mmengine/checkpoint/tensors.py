"""Reads the headers of a folder's safetensors files, and checks that the files are complete.

A folder is untrusted. The header's size is therefore limited, and offsets are checked before any data is
read. A file consists of the header's length in 8 bytes, a JSON header with the dtype, shape and offsets of
each tensor, and the data (https://huggingface.co/docs/safetensors, "Format"). This module does not import
torch.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from mmengine.checkpoint.files import open_regular, read_json
from mmengine.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 * 2**20
MAX_SHARDS = 1000
MAX_NAME_CHARS = 300
MAX_FILE_NAME_BYTES = 255  # The limit in common file systems.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Coding(NamedTuple):
    """How a quantised matrix is stored: as e4m3 codes, or as integer codes with 8 or 4 bits.

    `group` neighbouring values of a row share a scale and, if `mins` is true, a minimum.
    """

    form: Literal["fp8", "int8", "int4"]
    group: int
    mins: bool = False


class CodedRows(NamedTuple):
    """Rows of integer codes.

    `codes`: int8 [m, k], from -127 to 127, or for 4 bits from -8 to 7. `scales`: float32 [m, ceil(k /
    group)], exactly representable in float16. `mins`: None, or the minimum to add to each group's values,
    with the dtype and shape of `scales`.
    """

    codes: np.ndarray
    scales: np.ndarray
    mins: np.ndarray | None = None


class Blocks(NamedTuple):
    """A GGUF type whose blocks the CPU kernels multiply in the stored format.

    `number`, `name`: the type's number and name in GGUF files. `halves`: byte offsets of the float16 numbers
    in a block.
    """

    number: int
    name: str
    halves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is stored. `start`: its byte offset in the file `path`."""

    path: Path
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def coding(self) -> Coding | None:
        """Return the tensor's code format, or None for a tensor of plain numbers."""
        return None

    def coded(self, begin: int, end: int) -> Iterator[tuple[int, CodedRows]]:
        """Yield rows [begin, end) as integer codes, several rows at a time.

        Each item is a pair: the first row's index, counted from `begin`, and the rows. Raises ModelError.
        """
        raise NotImplementedError(f"{self.stored_name} is not stored as integer codes")

    @property
    def is_decoded(self) -> bool:
        """Return whether the stored numbers must be decoded. If so, only `pieces` returns the tensor's
        values.
        """
        return False

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows [begin, end) as float32 values, in pairs like `coded`. Raises ModelError."""
        raise NotImplementedError(f"{self.stored_name} is stored as plain numbers")

    @property
    def form_name(self) -> str:
        """Return the name of the tensor's code format if the engine always dequantises the codes, else ""."""
        return ""

    @property
    def blocks(self) -> Blocks | None:
        """Return the block type of a matrix that is stored in GGUF blocks, else None."""
        return None

    def block_rows(self, begin: int, end: int, signed: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows [begin, end) as uint8 [m, bytes per row], in pairs like `coded`.

        `signed`: whether to refuse the int8 code -128, which no valid Q8_0 tensor contains. Raises
        ModelError.
        """
        raise NotImplementedError(f"{self.stored_name} is not stored in GGUF's blocks")

    @property
    def companions(self) -> tuple["TensorEntry", ...]:
        """Return the other stored tensors that decoding needs, such as scales."""
        return ()


def tensor_error(entry: TensorEntry, what: str) -> ModelError:
    """Return an error that names a tensor and its file. `what`: the message after the tensor's name."""
    return ModelError(f"{entry.path}: tensor {entry.stored_name} {what}")


def open_tensors(
    folder: Path, canonical_name: Callable[[str], str | None], dtypes: Mapping[str, int] = FLOAT_BYTES
) -> dict[str, TensorEntry]:
    """Return canonical name -> tensor for every tensor in the folder's weights (`weight_files`).

    Tensors without a canonical name (None) are left out.

    `dtypes`: safetensors name of each allowed dtype -> size of a value in bytes. Raises ModelError if files
    are missing, cut short or damaged, if a tensor is stored twice, or if its dtype is not allowed.
    """
    entries: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        for entry in _entries_of(path, dtypes):
            name = canonical_name(entry.stored_name)
            if name is None:
                continue
            if name in entries:
                raise ModelError(f"{path} and {entries[name].path.name} both hold tensor {entry.stored_name}")
            entries[name] = entry
    if not entries:
        raise ModelError(f"the weights in {folder} hold no tensors")
    return entries


def check_tensors(
    folder: Path,
    entries: dict[str, TensorEntry],
    expected: dict[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> None:
    """Raise ModelError for a tensor that is missing, has a wrong shape, or does not belong to the model.

    `expected`: canonical name -> shape, for each tensor of the model. `optional`: names of tensors that may
    be missing.
    """
    allowed_missing = frozenset(optional)
    config = "config.json" if folder.is_dir() else "its metadata"
    for name, shape in expected.items():
        if name not in entries:
            if name in allowed_missing:
                continue
            raise ModelError(f"the weights in {folder} have no tensor {name}; the download is incomplete")
        entry = entries[name]
        if entry.shape != shape:
            raise ModelError(
                f"{entry.path}: tensor {entry.stored_name} has shape {list(entry.shape)}; {config} "
                f"requires {list(shape)}"
            )
    for name, entry in entries.items():
        if name not in expected:
            raise ModelError(
                f"{entry.path}: tensor {entry.stored_name} does not belong "
                f"to the model that {config} describes"
            )


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights. Raises ModelError if a file is missing.

    As in transformers, model.safetensors is preferred to an index with shards, because the shards may remain
    from an older save.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ModelError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    names = indexed_files(folder)
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing, though {INDEX_FILE} names it; download it")
    return [folder / name for name in names]


def indexed_files(folder: Path) -> list[str]:
    """Return the sorted names of the files in a folder's index. The files need not exist.

    Raises ModelError for an index without files, with too many files, or with an invalid file name.
    """
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    if len(names) > MAX_SHARDS:
        raise ModelError(f"{index} names {len(names)} files; the limit is {MAX_SHARDS}")
    for name in names:
        is_name = Path(name).name == name and name.isprintable() and len(name.encode()) <= MAX_FILE_NAME_BYTES
        if not is_name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name[:100]!r}, which is not a safetensors file in this folder")
    return names


def _entries_of(path: Path, dtypes: Mapping[str, int]) -> list[TensorEntry]:
    try:
        with open_regular(path) as file:
            return read_header(path, file, path.stat().st_size, dtypes)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def read_header(path: Path, file: BinaryIO, file_bytes: int, dtypes: Mapping[str, int]) -> list[TensorEntry]:
    """Return the tensors of a safetensors file.

    `file` must be at its beginning, and has `file_bytes` bytes. `path` appears only in messages and entries.
    Raises ModelError as `open_tensors` does, and OSError if the file cannot be read.
    """
    header_bytes = int.from_bytes(file.read(8), "little")
    if file_bytes < 8 or 8 + header_bytes > file_bytes:
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file; download it again")
        raise ModelError(
            f"{path} is cut short: it has {file_bytes} bytes, its header alone needs "
            f"{8 + max(header_bytes, 2)}; download it again"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelError(f"{path} has a header of {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        header = json.loads(file.read(header_bytes))
    except (ValueError, RecursionError):
        raise ModelError(f"{path} has a damaged header; download it again") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a damaged header; download it again")
    header.pop("__metadata__", None)
    entries = [_entry(path, name, value, 8 + header_bytes, dtypes) for name, value in header.items()]
    needed = max((entry.start + entry.num_bytes for entry in entries), default=8 + header_bytes)
    if needed > file_bytes:
        raise ModelError(f"{path} is cut short: it has {file_bytes} bytes of {needed}; download it again")
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int, dtypes: Mapping[str, int]) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        sound = isinstance(dtype, str) and (name + dtype).isprintable()  # Errors show name and dtype.
        sound = sound and all(type(x) is int and 0 <= x < 2**50 for x in numbers)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or len(shape) > 8 or len(name) > MAX_NAME_CHARS:
        raise ModelError(f"{path} describes tensor {name!r:.200} wrongly; download it again")
    if dtype not in dtypes:
        raise ModelError(
            f"{path}: tensor {name} is stored as {dtype[:20]}; supported are {', '.join(dtypes)}"
        )
    if end - begin != math.prod(shape) * dtypes[dtype]:
        raise ModelError(
            f"{path}: tensor {name} has {end - begin} bytes, which its shape {shape} contradicts"
        )
    return TensorEntry(path, name, dtype, tuple(shape), data_start + begin, end - begin)

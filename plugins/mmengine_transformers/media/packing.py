"""Packs a media item's processor output into rows of bytes, and unpacks the rows.

The rows are `MediaInput.patches`: uint8 [n, ROW_BYTES]. The rows contain a fixed head, a JSON header, each
tensor's bytes, and zeros at the end. The item's content hash covers all rows. This module does not import
torch.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

ROW_BYTES = 4096
_MAGIC = b"mmtransf"
_HEAD = struct.Struct("<8sIIQ")  # Magic, version, size of the header, size of the whole item.
_VERSION = 1
_ALIGNMENT = 16
_MAX_HEADER = 2**22
_BFLOAT16 = "bfloat16"  # NumPy has no such type, so the values are stored as uint16.


class PackedTensor(NamedTuple):
    """A tensor's position in a packed item. `dtype`: torch's name for the dtype, such as float32."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def stored(self) -> np.dtype:
        """Return the stored bytes' NumPy type."""
        return np.dtype(np.uint16 if self.dtype == _BFLOAT16 else self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.stored.itemsize


class Header(msgspec.Struct, frozen=True):
    """The header of a packed item. `text`: the text that the processor writes for the placeholder.
    `num_embeds`: number of embeddings. `indicators`: (embedding index, constant's number) for embeddings that
    are constants in the model.
    """

    text: str
    num_embeds: int
    tensors: tuple[PackedTensor, ...]
    indicators: tuple[tuple[int, int], ...] = ()


class Packed(NamedTuple):
    """An unpacked item. `arrays`: the stored values of the tensors, as views of the rows."""

    header: Header
    arrays: dict[str, np.ndarray]
    num_rows: int


def pack(
    text: str,
    num_embeds: int,
    tensors: Mapping[str, tuple[str, np.ndarray]],
    indicators: tuple[tuple[int, int], ...] = (),
) -> np.ndarray:
    """Return the rows for an item. `tensors`: name -> (torch's dtype, stored values). Other parameters: see
    Header.
    """
    entries, size = [], 0
    for name, (dtype, values) in tensors.items():
        entries.append(PackedTensor(name, dtype, values.shape, size))
        size += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = msgspec.json.encode(Header(text, num_embeds, tuple(entries), indicators))
    start = _start_of_data(len(header))
    rows = np.zeros((-(-(start + size) // ROW_BYTES), ROW_BYTES), np.uint8)
    flat = rows.reshape(-1)
    flat[: _HEAD.size] = np.frombuffer(_HEAD.pack(_MAGIC, _VERSION, len(header), start + size), np.uint8)
    flat[_HEAD.size : _HEAD.size + len(header)] = np.frombuffer(header, np.uint8)
    for entry, (_, values) in zip(entries, tensors.values(), strict=True):
        place = flat[start + entry.start :][: values.nbytes]
        place[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return rows


def read_header(rows: np.ndarray) -> Header:
    """Return the header of the item that starts in the first row. Raises ValueError for invalid bytes."""
    return _read(rows)[0]


def unpack(rows: np.ndarray) -> Iterator[Packed]:
    """Yield the items that are stored one after another in `rows`. Raises ValueError for invalid bytes."""
    while len(rows):
        header, start, size = _read(rows)
        num_rows = -(-size // ROW_BYTES)
        flat = rows[:num_rows].reshape(-1)
        arrays = {}
        for entry in header.tensors:
            place = flat[start + entry.start :][: entry.num_bytes]
            arrays[entry.name] = place.view(entry.stored).reshape(entry.shape)
        yield Packed(header, arrays, num_rows)
        rows = rows[num_rows:]


def _start_of_data(header_bytes: int) -> int:
    return -(-(_HEAD.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT


def _read(rows: np.ndarray) -> tuple[Header, int, int]:
    """Return the first item's header, the start of its data in bytes, and its size in bytes."""
    flat = rows.reshape(-1)
    magic, version, header_bytes, size = _HEAD.unpack(flat[: _HEAD.size].tobytes())
    if magic != _MAGIC or version != _VERSION:
        raise ValueError("the patches were not packed by this version of the plugin")
    start = _start_of_data(header_bytes)
    if header_bytes > _MAX_HEADER or not start <= size <= flat.size:
        raise ValueError("the packed item is damaged: its sizes do not fit its rows")
    try:
        header = msgspec.json.decode(flat[_HEAD.size : _HEAD.size + header_bytes].tobytes(), type=Header)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the packed item is damaged: {error}") from None
    if any(each.start < 0 or start + each.start + each.num_bytes > size for each in header.tensors):
        raise ValueError("the packed item is damaged: a tensor ends outside the rows")
    return header, start, size

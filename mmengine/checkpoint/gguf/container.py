"""Reads the metadata of a GGUF file and the positions of its tensors.

A file contains, in order: "GGUF", a version and two counts; the keys with typed values; each tensor's name,
dimensions, type and offset; padding; the data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A
file is untrusted, so each count is compared with the file's size before memory is allocated.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.files import read_range
from mmengine.checkpoint.gguf.source import Source
from mmengine.checkpoint.gguf.types import OTHER_TYPES, TYPES, StoredType
from mmengine.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 2**16  # Maximum number of keys; typical files have about 40.
MAX_TENSORS = 2**16  # Maximum number of tensors; a model with 100 layers has 1,200.
MAX_NAME_BYTES = 300  # Maximum length of a key or a tensor name.
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
_NUMBERS = {  # The struct format of each numeric type.
    kind: struct.Struct(f"<{form}") for kind, form in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
# Minimum sizes in bytes: a key with its value, and a tensor description.
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in the metadata. Its values are read from the file only when needed.

    `form`: the struct format of the numbers, or "" for an array of strings.
    """

    path: Path
    key: str
    form: str
    count: int
    start: int  # Byte offset.
    num_bytes: int

    def __repr__(self) -> str:  # Shown in errors.
        return f"an array of {self.count}"

    def as_strings(self) -> list[str]:
        """Return the strings. Raises ModelError if the array holds no strings."""
        data, found, position = self._read("strings", self.form == ""), [], 0
        try:
            for _ in range(self.count):
                (length,) = struct.unpack_from("<Q", data, position)
                position += 8 + length
                found.append(data[position - length : position].decode())
        except (struct.error, UnicodeDecodeError, OverflowError):
            raise ModelError(f"{self.path}: {self.key} is damaged; download the file again") from None
        return found

    def as_integers(self) -> np.ndarray:
        """Return the integers, int64 [count]. Raises ModelError if the array holds no integers."""
        data = self._read("integers", self.form not in ("", "f", "d", "?"))
        return np.frombuffer(data, f"<{self.form}").astype(np.int64)

    def as_numbers(self) -> list[float]:
        """Return the floating-point numbers. Raises ModelError if the array holds other values."""
        return [
            float(x) for x in np.frombuffer(self._read("floats", self.form in ("f", "d")), f"<{self.form}")
        ]

    def as_flags(self) -> list[bool]:
        """Return the truth values. Raises ModelError if the array holds other values."""
        return [byte != 0 for byte in self._read("truth values", self.form == "?")]

    def _read(self, what: str, is_so: bool) -> bytes:
        if not is_so:
            raise ModelError(f"{self.path}: {self.key} holds no {what}")
        return read_range(self.path, self.start, self.num_bytes, self.key)


Value = bool | int | float | str | StoredArray


@dataclass(frozen=True, slots=True)
class StoredTensor:
    path: Path
    name: str
    type: StoredType
    shape: tuple[int, ...]  # The last dimension is contiguous and consists of whole blocks.
    start: int  # Byte offset in the file.
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Container:
    """The header of a GGUF file: metadata, and tensors by name in the file's order."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]

    @property
    def fields(self) -> Fields:
        """Return the metadata as Fields, whose getters check the values."""
        return Fields(dict(self.metadata), self.path, "")


def open_container(path: Path) -> Container:
    """Read a file's header. Memory use depends on the header's size, not on the weights.

    Raises ModelError for a file that is not GGUF version 2 or 3, is damaged or cut short, contains tensors of
    unsupported types, or has numbers out of range.
    """
    try:
        with path.open("rb", buffering=2**18) as file:
            source = Source(path, file, path.stat().st_size)
            num_tensors, num_keys = _counts(source)
            metadata = _metadata(source, num_keys)
            tensors = _tensors(source, num_tensors, _alignment(source, metadata))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    return Container(path, metadata, tensors)


def _counts(source: Source) -> tuple[int, int]:
    if source.num_bytes < 24 or source.take(4) != MAGIC:
        source.fail("the file is not GGUF, or is cut short; download it again")
    version = source.count(4)
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        kind = f"{swapped} in big-endian order" if swapped in VERSIONS else str(version)
        source.fail(f"the GGUF version is {kind}; supported are 2 and 3 in little-endian order")
    num_tensors, num_keys = source.count(8), source.count(8)
    for count, what, most, least in (
        (num_keys, "keys", MAX_KEYS, _LEAST_KEY),
        (num_tensors, "tensors", MAX_TENSORS, _LEAST_TENSOR),
    ):
        if count > most:
            source.fail(f"the header claims {count} {what}; the limit is {most}")
        if count > source.remaining // least:
            source.fail(f"the header claims {count} {what}, too many for {source.num_bytes} bytes")
    return num_tensors, num_keys


def _metadata(source: Source, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = _name(source, "a key")
        if key in metadata:
            source.fail(f"the key {key} is stored twice")
        metadata[key] = _value(source, key)
    return metadata


def _name(source: Source, of: str) -> str:
    name = source.text(f"the name of {of}", MAX_NAME_BYTES)
    if not name.isprintable():  # Errors show the name.
        source.fail(f"the name of {of} is {name[:60]!r}, which cannot be printed")
    return name


def _value(source: Source, key: str) -> Value:
    kind = source.count(4)
    if kind in _NUMBERS:
        return source.scalar(_NUMBERS[kind])
    if kind == _STRING:
        return source.text(key)
    if kind != _ARRAY:
        source.fail(f"{key} has a value of the unknown type {kind}; the file is damaged")
    kind, count = source.count(4), source.count(8)
    if kind == _ARRAY:
        source.fail(f"{key} is an array of arrays, which are not supported")
    if kind != _STRING and kind not in _NUMBERS:
        source.fail(f"{key} is an array of the unknown type {kind}; the file is damaged")
    least = 8 if kind == _STRING else _NUMBERS[kind].size
    if count > source.remaining // least:
        source.fail(f"{key} claims {count} entries, too many for {source.num_bytes} bytes")
    start = source.position
    if kind == _STRING:
        source.skip_strings(count, key)
    else:
        source.skip(count * least)
    form = "" if kind == _STRING else _NUMBERS[kind].format[1:]
    return StoredArray(source.path, key, form, count, start, source.position - start)


def _alignment(source: Source, metadata: dict[str, Value]) -> int:
    value = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        source.fail(f"{ALIGNMENT} is {repr(value)[:60]}; it must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _tensors(source: Source, num_tensors: int, alignment: int) -> dict[str, StoredTensor]:
    told = [_tensor(source) for _ in range(num_tensors)]
    data_start = -(-source.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, kind, shape, offset in told:
        if name in tensors:
            source.fail(f"tensor {name} is stored twice")
        if offset % alignment:
            source.fail(f"tensor {name} begins at {offset}, not a multiple of the alignment {alignment}")
        num_bytes = kind.num_bytes(shape)
        tensors[name] = StoredTensor(source.path, name, kind, shape, data_start + offset, num_bytes)
    end, before = data_start, ""
    for tensor in sorted(tensors.values(), key=lambda each: each.start):
        if tensor.start < end:
            source.fail(f"tensors {before} and {tensor.name} overlap; the file is damaged")
        end, before = tensor.start + tensor.num_bytes, tensor.name
        if end > source.num_bytes:
            source.fail(
                f"the file is cut short or damaged: tensor {before} ends "
                f"at byte {end} of {source.num_bytes}; "
                "download it again"
            )
    return tensors


def _tensor(source: Source) -> tuple[str, StoredType, tuple[int, ...], int]:
    """Return name, type, shape and offset. The caller must check that the tensor lies within the file."""
    name = _name(source, "a tensor")
    num_dimensions = source.count(4)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        source.fail(f"tensor {name} has {num_dimensions} dimensions; supported are 1 to {MAX_DIMENSIONS}")
    shape = tuple(source.count(8) for _ in range(num_dimensions))[::-1]
    number, offset = source.count(4), source.count(8)
    kind = TYPES.get(number)
    if kind is None:
        known = ", ".join(each.name for each in TYPES.values())
        stored = OTHER_TYPES.get(number, f"type {number}, which is unknown here")
        source.fail(f"tensor {name} is stored as {stored}; choose a file with a supported type: {known}")
    if not all(0 < size <= 2 * source.num_bytes for size in shape) or shape[-1] % kind.values:
        blocks = f", the last a multiple of {kind.values}" if kind.values > 1 else ""
        source.fail(
            f"tensor {name} of type {kind.name} has shape {list(shape)}; "
            "sizes must be from 1 to the number that "
            f"{source.num_bytes} bytes hold{blocks}"
        )
    return name, kind, shape, offset

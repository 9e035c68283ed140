"""Reads matrices with 4-bit weights, as compressed-tensors, GPTQ and AWQ store them. Does not import torch.

A matrix `X.weight` [out, in] is stored as several tensors. Along `in`, each group of g values shares a scale
and, if the matrix is not symmetric, a zero. A weight is (code - zero) * scale. Each int32 word packs eight
4-bit codes, starting with the lowest bits. The three layouts are:

* compressed-tensors, "pack-quantized": `X.weight_packed` int32 [out, ceil(in / 8)], which stores code + 8;
  `X.weight_scale` [out, in / g]; `X.weight_shape`; and if not symmetric, `X.weight_zero_point` int32
  [ceil(out / 8), in / g], where a word has the zeros for eight rows
  (https://github.com/vllm-project/compressed-tensors).
* GPTQ: `X.qweight` int32 [in / 8, out]; `X.qzeros` int32 [in / g, out / 8], which stores zero - 1 unless the
  format is "gptq_v2"; `X.scales` [in / g, out]; and `X.g_idx`, the group index of each value along `in`.
  Only groups in ascending order are supported (https://github.com/ModelCloud/GPTQModel).
* AWQ, "gemm": `X.qweight` int32 [in, out / 8] and `X.qzeros`, whose words contain eight columns in the
  order 0, 2, 4, 6, 1, 3, 5, 7; `X.scales` (https://github.com/casper-hansen/AutoAWQ).
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from mmengine.checkpoint.files import read_range
from mmengine.checkpoint.float_values import FLOATS, read_floats, read_scales
from mmengine.checkpoint.tensors import CodedRows, Coding, TensorEntry, tensor_error

Layout = Literal["compressed-tensors", "gptq", "awq"]
WORDS, SIZES = "I32", "I64"
STORED_BYTES = {WORDS: 4, SIZES: 8}
GROUPS = (32, 64, 128)
PIECE_VALUES = 2**22  # Approximate maximum number of values in an unpacked piece.
_IN_A_WORD, _MIDDLE = 8, 8
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # For each of eight columns: its position in a word.
_ENDINGS: dict[Layout, tuple[str, ...]] = {
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    ),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros"),
}


class Int4(NamedTuple):
    """How a folder's matrices are stored. `group`: values per group. `zero_less`: 1 if the files store
    zero - 1 (GPTQ without "gptq_v2"), else 0.
    """

    layout: Layout
    group: int
    has_zeros: bool
    zero_less: int = 0


@dataclass(frozen=True, slots=True)
class Int4Entry(TensorEntry):
    """A 4-bit matrix. `shape` is the shape [out, in] of the matrix. The other inherited fields describe the
    tensor with the packed words.
    """

    how: Int4
    packed: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    others: tuple[TensorEntry, ...]
    fits_float16: bool  # Whether float16 can represent all scales exactly.

    @property
    def is_decoded(self) -> bool:
        return True

    @property
    def coding(self) -> Coding | None:
        """Return the matrix's Coding, or None if float16 cannot represent all scales exactly."""
        coding = Coding("int4", self.how.group, mins=self.zeros is not None)
        return coding if self.fits_float16 else None

    @property
    def companions(self) -> tuple[TensorEntry, ...]:
        return (self.scales, *((self.zeros,) if self.zeros is not None else ()), *self.others)

    def coded(self, begin: int, end: int) -> Iterator[tuple[int, CodedRows]]:
        scales = np.ascontiguousarray(self._along_rows(read_floats(self.scales)))
        zeros = None if self.zeros is None else self._zeros(self.zeros)
        step = max(1, PIECE_VALUES // self.shape[1] // _IN_A_WORD) * _IN_A_WORD
        words = _words(self.packed)
        for first in range(begin, end, step):
            rows = slice(first, min(first + step, end))
            mins = None if zeros is None else zeros[rows] * -scales[rows]
            yield first - begin, CodedRows(self._codes(words, rows), scales[rows], mins)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (row offset from `begin`, float32 weights) for the rows from `begin` to `end`, in pieces."""
        for place, (codes, scales, mins) in self.coded(begin, end):
            values = codes * self._spread(scales)
            yield place, values if mins is None else values + self._spread(mins)

    def _spread(self, shared: np.ndarray) -> np.ndarray:
        return np.repeat(shared, self.how.group, 1)[:, : self.shape[1]]

    def _along_rows(self, values: np.ndarray) -> np.ndarray:
        return values if self.how.layout == "compressed-tensors" else values.T

    def _codes(self, words: np.ndarray, rows: slice) -> np.ndarray:
        """Return the codes of `rows`, from -8 to 7, as int8 [rows, in]."""
        if self.how.layout == "compressed-tensors":
            return _unpacked(words[rows], 1)[:, : self.shape[1]]
        if self.how.layout == "gptq":
            return np.ascontiguousarray(_unpacked(words[:, rows], 0).T)
        low = rows.start // _IN_A_WORD * _IN_A_WORD
        some = _unpacked(words[:, low // _IN_A_WORD : -(-rows.stop // _IN_A_WORD)], 1, _AWQ_ORDER)
        return np.ascontiguousarray(some[:, rows.start - low : rows.stop - low].T)

    def _zeros(self, entry: TensorEntry) -> np.ndarray:
        """Return the zeros minus 8, as float32 [out, groups]. `_codes` also subtracts 8, so code - zero stays
        the same.
        """
        if self.how.layout == "compressed-tensors":
            found = _unpacked(_words(entry), 0)
        else:
            order = _AWQ_ORDER if self.how.layout == "awq" else tuple(range(_IN_A_WORD))
            found = _unpacked(_words(entry), 1, order).T
        return found[: self.shape[0]].astype(np.float32) + self.how.zero_less


def _unpacked(words: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(_IN_A_WORD))) -> np.ndarray:
    """Unpack int32 words to int8 codes from -8 to 7. A code is the stored value minus 8.

    `axis` becomes eight times as long. `order[i]`: the position of the i-th code in its word.
    """
    shifts = np.array([4 * place for place in order], np.int32)
    spread = np.expand_dims(words, axis + 1) >> (shifts[:, None] if axis == 0 else shifts)
    size = list(words.shape)
    size[axis] *= _IN_A_WORD
    return ((spread & 15).astype(np.int8) - np.int8(_MIDDLE)).reshape(size)


def _words(entry: TensorEntry) -> np.ndarray:
    data = read_range(entry.path, entry.start, entry.num_bytes, f"tensor {entry.stored_name}")
    return np.frombuffer(data, "<i4").reshape(entry.shape)


def with_codes(entries: dict[str, TensorEntry], how: Int4) -> dict[str, TensorEntry]:
    """Return the tensors by canonical name, with a single entry for each 4-bit matrix.

    Reads scales, zeros, stored shapes and group indices from the files, but no codes. Raises ModelError if a
    tensor that belongs to a matrix is missing or invalid.
    """
    first, *endings = _ENDINGS[how.layout]
    found, used = dict(entries), set[str]()
    for name in [name for name in entries if name.endswith(f".{first}")]:
        beginning = name.removesuffix(first)
        parts = {ending: entries[beginning + ending] for ending in endings if beginning + ending in entries}
        used |= {name, *(beginning + ending for ending in parts)}
        found[f"{beginning}weight"] = _entry(entries[name], parts, how)
    return {name: entry for name, entry in found.items() if name not in used}


def without_zero_biases(entries: dict[str, TensorEntry], expected: Container[str]) -> dict[str, TensorEntry]:
    """Return the entries without the all-zero biases of GPTQ matrices, except biases in `expected`.

    Older AutoGPTQ versions store a bias for every matrix, even if the model has no biases. Raises ModelError
    if a bias cannot be read.
    """
    unwanted = set()
    for name, entry in entries.items():
        if not isinstance(entry, Int4Entry) or entry.how.layout != "gptq":
            continue
        bias = f"{name.removesuffix('weight')}bias"
        found = entries.get(bias)
        if found is None or bias in expected or found.shape != entry.shape[:1] or found.dtype not in FLOATS:
            continue
        if not read_floats(found).any():
            unwanted.add(bias)
    return {name: entry for name, entry in entries.items() if name not in unwanted}


def check_words(entries: Mapping[str, TensorEntry]) -> None:
    """Raise ModelError for an int32 or int64 tensor that belongs to no 4-bit matrix."""
    for entry in entries.values():
        if entry.dtype in STORED_BYTES and not isinstance(entry, Int4Entry):
            raise tensor_error(entry, f"is stored as {entry.dtype}, but belongs to no supported 4-bit matrix")


def _entry(packed: TensorEntry, parts: Mapping[str, TensorEntry], how: Int4) -> Int4Entry:
    _, scale_name, zero_name, *_ = _ENDINGS[how.layout]
    wanted = [scale_name, *([zero_name] if how.has_zeros else [])]
    for ending in wanted:
        if ending not in parts:
            missing = packed.stored_name.removesuffix(_ENDINGS[how.layout][0]) + ending
            raise tensor_error(packed, f"has 4-bit codes, but {missing} is missing; download it again")
    if packed.dtype != WORDS or len(packed.shape) != 2:
        raise tensor_error(packed, f"is {packed.dtype} {list(packed.shape)}; codes must be {WORDS} matrices")
    scales, zeros = parts[scale_name], parts[zero_name] if how.has_zeros else None
    shape = _shape(packed, scales, parts, how)
    _check_order(parts, shape, how)
    values = read_scales(scales)
    entry = Int4Entry(
        packed.path,
        packed.stored_name,
        packed.dtype,
        shape,
        packed.start,
        packed.num_bytes,
        how,
        packed,
        scales,
        zeros,
        tuple(part for ending, part in parts.items() if ending not in (scale_name, zero_name)),
        bool((values.astype(np.float16).astype(np.float32) == values).all()),
    )
    if zeros is not None and not entry._zeros(zeros).any():  # If every zero is 8, the matrix is symmetric.
        return replace(entry, zeros=None, others=(zeros, *entry.others))
    return entry


def _shape(
    packed: TensorEntry, scales: TensorEntry, parts: Mapping[str, TensorEntry], how: Int4
) -> tuple[int, int]:
    """Return the shape [out, in] of a matrix. Raises ModelError if its tensors have inconsistent shapes or a
    wrong dtype.
    """
    high, wide = packed.shape
    if how.layout == "compressed-tensors":
        said = parts.get("weight_shape")
        rows, columns = (high, wide * _IN_A_WORD) if said is None else _said_shape(said)
        fits = rows == high and -(-columns // _IN_A_WORD) == wide
    else:
        in_words = how.layout == "gptq"
        rows, columns = (wide, high * _IN_A_WORD) if in_words else (wide * _IN_A_WORD, high)
        fits = rows % _IN_A_WORD == 0 and columns % how.group == 0
    if not fits or not rows or not columns:
        raise tensor_error(
            packed, f"has shape {list(packed.shape)}, which does not fit {rows} rows and {columns} columns"
        )
    groups, eighths = -(-columns // how.group), -(-rows // _IN_A_WORD)
    by_rows = how.layout == "compressed-tensors"
    wanted = [(scales, (rows, groups) if by_rows else (groups, rows), tuple(FLOATS))]
    if how.has_zeros:
        zeros = parts[_ENDINGS[how.layout][2]]
        wanted.append((zeros, (eighths, groups) if by_rows else (groups, eighths), (WORDS,)))
    for entry, shape, dtypes in wanted:
        if entry.shape != shape or entry.dtype not in dtypes:
            raise tensor_error(
                entry,
                f"is {entry.dtype} {list(entry.shape)}; for {rows} rows and {columns} columns in "
                f"groups of {how.group} it must be {' or '.join(dtypes)} {list(shape)}",
            )
    return rows, columns


def _said_shape(entry: TensorEntry) -> tuple[int, int]:
    if entry.dtype != SIZES or entry.shape != (2,):
        raise tensor_error(entry, f"is {entry.dtype} {list(entry.shape)}; a matrix shape must be {SIZES} [2]")
    data = read_range(entry.path, entry.start, entry.num_bytes, f"tensor {entry.stored_name}")
    rows, columns = np.frombuffer(data, "<i8").tolist()
    return rows, columns


def _check_order(parts: Mapping[str, TensorEntry], shape: tuple[int, int], how: Int4) -> None:
    """Raise ModelError if the group indices are not in ascending order, or have the wrong dtype or shape."""
    for ending in ("g_idx", "weight_g_idx"):
        if (entry := parts.get(ending)) is None:
            continue
        if entry.dtype != WORDS or entry.shape != shape[1:]:
            raise tensor_error(entry, f"is {entry.dtype} {list(entry.shape)}, not {WORDS} {[shape[1]]}")
        if not np.array_equal(_words(entry), np.arange(shape[1]) // how.group):
            raise tensor_error(entry, "orders values by activation (act-order), which is not supported")

"""Reads weights from safetensors or GGUF files onto a device, casts them, and joins several tensors to one
matrix.

mmengine.checkpoint checks names and shapes before memory is allocated. An untrusted folder therefore cannot
use more memory than its files' sizes justify. safetensors files are mapped. Matrices are read in pieces. A
piece is a view into the file if the tensor is stored in the requested dtype. Otherwise, memory contains only
a single converted piece at a time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from mmengine.checkpoint import fp8
from mmengine.checkpoint.fp8 import Fp8Entry
from mmengine.checkpoint.gguf.tensors import GGUFEntry
from mmengine.checkpoint.mapped_file import MappedFile
from mmengine.checkpoint.stacked_experts import TurnedEntry
from mmengine.checkpoint.tensors import Coding, TensorEntry, tensor_error
from mmengine.errors import ModelError
from mmengine.models.held_weights import HeldWeights, faster_as_codes, holds_blocks, row_form
from mmengine.models.progress import report_weights
from mmengine.models.quantising import FP8_ROWS, Activations, quantise
from mmengine.native import library as native
from mmengine.native.blocks import ChunkedBlocks, runs_of
from mmengine.native.linear import (
    GROUPS,
    AnyWeight,
    ChunkedCodes,
    ChunkedWeight,
    Codes,
    Form,
    multiplies_float32,
)

PIECE_VALUES = 2**22  # Number of values in a piece; 8 MiB in bfloat16.
FORMS = {"fp8": Form.FP8, "int8": Form.INT8, "int4": Form.INT4}
R = TypeVar("R", torch.Tensor, Codes)
STORED = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    fp8.STORED: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Selects a rank's part of each tensor. `axis_of`: returns the dimension along which a tensor is cut into
    `count` equal parts, or None for a whole tensor. `index`: the part to read.
    """

    index: int
    count: int
    axis_of: Callable[[str], int | None]


WHOLE = Part(0, 1, lambda name: None)


class WeightReader:
    """Reads tensors by canonical name onto `device` as `dtype`. If a tensor is cut over ranks, only this
    rank's part is read.

    `quantize`: the coding to which `held` quantises matrices, or None. `activations`: "int8" if input rows
    are quantised before they are multiplied by integer codes.
    """

    def __init__(
        self,
        entries: dict[str, TensorEntry],
        files: dict[Path, MappedFile],
        device: torch.device,
        dtype: torch.dtype,
        part: Part = WHOLE,
        quantize: Coding | None = None,
        activations: Activations = "model",
    ) -> None:
        self._entries, self._files, self._device, self._dtype = entries, files, device, dtype
        self._part, self._quantize, self._activations = part, quantize, activations
        library = native.load() if device.type == "cpu" else None
        self._held_weights = HeldWeights(library, dtype, activations)
        self._num_read, self._whole = 0, sum(entry.num_bytes for entry in entries.values())  # In bytes.

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which this reader returns tensors."""
        return self._dtype

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, *names: str) -> torch.Tensor:
        """Return a tensor, or several tensors joined along their first dimension. A scalar has shape [1]."""
        out = torch.empty(self._joined(names), device=self._device, dtype=self._dtype)
        self._held_weights.add_tensor(out)
        self._read_into(out, names)
        return out

    def release(self, tensor: torch.Tensor) -> None:
        """Record that a tensor which `read` returned is no longer in memory."""
        self._held_weights.remove_tensor(tensor)

    def _read_into(self, out: torch.Tensor, names: tuple[str, ...]) -> None:
        for first, rows in self._rows(names, self._stored):
            out[first : first + len(rows)].copy_(rows)

    def read_each(self, groups: Sequence[Sequence[str]]) -> torch.Tensor:
        """Return the groups' tensors, stacked as [groups, ...]. Each group's tensors are joined as in `read`.
        All joined tensors must have the same shape.
        """
        out = torch.empty(
            (len(groups), *self._joined(tuple(groups[0]))), device=self._device, dtype=self._dtype
        )
        for place, names in zip(out, groups, strict=True):
            self._read_into(place, tuple(names))
        return out

    def pieces(self, *names: str) -> ChunkedWeight:
        """Return the matrix [n, k] of joined tensors on the CPU, in pieces of rows.

        k is the product of all dimensions after the first. A piece is valid only until the next piece is
        taken.
        """
        shape = self._joined(names)
        rows = ((first, rows.flatten(1).to(self._dtype)) for first, rows in self._rows(names, self._stored))
        return ChunkedWeight(shape[0], math.prod(shape[1:]), self._dtype, rows)

    def held(self, *names: str, alike: bool = False) -> AnyWeight:
        """Return the joined matrix in a format that the kernels support.

        `_runs` decides whether the matrix stays in GGUF blocks. If not, the format is codes if the reader
        quantises, or if all tensors are stored with the same coding. Otherwise the format is `dtype`.
        `alike`: GGUF blocks are kept only if all have the same type.
        """
        if (runs := self._runs(names, alike)) is not None:
            return self._in_blocks(names, runs)
        return self._held(names, self._coding(names))

    def held_each(self, groups: Sequence[Sequence[str]]) -> list[AnyWeight]:
        """Return each group's matrix as `held` does, but all in the same format."""
        runs = [self._runs(names, alike=True) for names in groups]
        if runs[0] is not None and all(each == runs[0] for each in runs):
            return [self._in_blocks(names, runs[0]) for names in groups]
        coding = self._coding(tuple(name for names in groups for name in names))
        return [self._held(tuple(names), coding) for names in groups]

    def keeps_blocks(self, name: str) -> bool:
        """Return whether `held` returns this matrix in GGUF's blocks."""
        return self._runs((name,), alike=True) is not None

    def _runs(self, names: Sequence[str], alike: bool) -> tuple[tuple[int, int], ...] | None:
        """Return the runs of rows with the same block type, or None for a matrix that is not held in GGUF
        blocks.
        """
        found = [self._entries[name].blocks for name in names]
        types = [
            (self._entries[name].shape[0], each.number)
            for name, each in zip(names, found, strict=True)
            if each
        ]
        usable = self._part is WHOLE and self._quantize is None and self._activations == "model"
        usable = usable and not (faster_as_codes(found) and self._coding(names) is not None)
        if len(types) < len(names) or not usable or not holds_blocks(self._device, self._dtype):
            return None
        return runs_of(types) if len({number for _, number in types}) == 1 or not alike else None

    def _in_blocks(self, names: Sequence[str], runs: tuple[tuple[int, int], ...]) -> ChunkedBlocks:
        self._held_weights.add_types([self._entries[name] for name in names], as_codes=True)
        n, k = self._joined(tuple(names))
        rows = self._rows(tuple(names), self._block_rows)
        return self._held_weights.add(ChunkedBlocks(n, k, runs, rows, self._dtype))

    def _block_rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        entry = self._entries[name]
        pieces = entry.block_rows(0, entry.shape[0], signed=self._dtype == torch.bfloat16)
        return ((at, torch.from_numpy(rows)) for at, rows in pieces)

    def _held(self, names: tuple[str, ...], coding: Coding | None) -> ChunkedWeight | ChunkedCodes:
        if coding is None:
            self._held_weights.add_types([self._entries[name] for name in names], as_codes=False)
            return self._held_weights.add(self.pieces(*names))
        n, k = self._joined(names)
        rows = self._rows(names, partial(self._coded, coding=coding))
        form, blocks = FORMS[coding.form], [self._entries[name].blocks for name in names]
        rows_as = row_form(self._activations, coding, blocks if self._quantize is None else [])
        weight = ChunkedCodes(n, k, form, coding.group, rows, coding.mins, rows_as, self._dtype)
        return self._held_weights.add(weight, coding.form)

    def how_held(self) -> str:
        """Return a text that says how quantised matrices are held in memory, or "" if none is quantised."""
        return self._held_weights.text(list(self._entries.values()))

    def check_activations(self) -> None:
        """Raise ModelError if `activations` is "int8" but no matrix with integer codes was read."""
        self._held_weights.check_activations()

    def _coding(self, names: Sequence[str]) -> Coding | None:
        """Return the joined matrix's coding in memory, or None for the reader's dtype."""
        if not holds_codes(self._device, self._dtype) or (
            self._dtype == torch.float32 and (self._activations == "int8" or self._quantize is not None)
        ):
            return None
        if self._quantize is not None:
            return self._quantize
        found = [self._entries[name].coding for name in names]
        first, columns = found[0], [self._cut(name)[1] for name in names]
        if first is None or first.group not in GROUPS or any(each.start % first.group for each in columns):
            return None
        if any(each is None or each[:2] != first[:2] for each in found):
            return None
        if (self._dtype == torch.float32) if first.form == "fp8" else (self._part is not WHOLE):
            return None
        return first._replace(mins=any(each is not None and each.mins for each in found))

    def _coded(self, name: str, coding: Coding) -> Iterator[tuple[int, Codes]]:
        """Yield a matrix's rows as codes, in pieces. Raises ModelError for NaN and infinite values."""
        entry, (rows, _) = self._entries[name], self._cut(name)
        if self._quantize is not None:
            for place, values in self._stored(name, FP8_ROWS):
                made = quantise(values, coding)
                if made is None:
                    raise tensor_error(entry, "holds a value that is not finite")
                yield place, made
        elif isinstance(entry, Fp8Entry):
            scales = self._row_scales(name, entry)
            for place, values in self._codes(name, entry):
                yield place, Codes(values, scales[place : place + len(values)])
        else:
            for place, found in entry.coded(rows.start, rows.stop):
                codes, scale, mins = (None if each is None else torch.from_numpy(each) for each in found)
                assert codes is not None and scale is not None
                if coding.mins and mins is None:
                    mins = torch.zeros_like(scale)
                yield place, Codes(codes, scale, mins)

    def same(self, first: str, second: str) -> bool:
        """Return whether two stored tensors have equal values."""
        if self._entries[first].shape != self._entries[second].shape:
            return False
        pairs = zip(self._stored(first), self._stored(second), strict=True)
        return all(bool((mine == theirs).all()) for (_, mine), (_, theirs) in pairs)

    def _joined(self, names: tuple[str, ...]) -> tuple[int, ...]:
        shapes = [self._shape(name) for name in names]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self._cut(name))

    def _cut(self, name: str) -> list[slice]:
        """Return the range to read in each dimension."""
        sizes, axis = self._entries[name].shape or (1,), self._part.axis_of(name)
        cut = [slice(0, size) for size in sizes]
        if axis is not None:
            size = sizes[axis] // self._part.count
            cut[axis] = slice(self._part.index * size, (self._part.index + 1) * size)
        return cut

    def _rows(
        self,
        names: tuple[str, ...],
        stored: Callable[[str], Iterator[tuple[int, R]]],
    ) -> Iterator[tuple[int, R]]:
        """Yield (index of the first row, rows) for each piece of the joined tensor. `stored`: yields the
        pieces of a single tensor."""
        row = 0
        for name in names:
            before, entry, count = self._num_read, self._entries[name], self._shape(name)[0]
            for place, values in stored(name):
                yield row + place, values
                num_rows = len(values[0] if isinstance(values, tuple) else values)
                self._num_read = before + entry.num_bytes * (place + num_rows) // count
                report_weights(self._num_read, self._whole)
            row += count

    def _stored(self, name: str, rows_in: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first row, rows) for each piece of this rank's part of a tensor. A piece has a
        multiple of `rows_in` rows, unless the piece is the last or the tensor is stored as codes.
        """
        entry, cut = self._entries[name], self._cut(name)
        pieces: Iterator[tuple[int, torch.Tensor]]
        if entry.is_decoded:
            pieces = ((at, torch.from_numpy(rows)) for at, rows in entry.pieces(cut[0].start, cut[0].stop))
        elif isinstance(entry, Fp8Entry):
            pieces = self._scaled(entry, cut[0])
        else:
            pieces = self._laid(entry, cut[0], rows_in)
        for place, rows in pieces:
            yield place, rows[(slice(None), *cut[1:])]

    def _scaled(self, entry: Fp8Entry, cut: slice) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield an FP8 matrix's rows as float32 values. A value is code times scale, as in transformers'
        Fp8Dequantize.
        """
        scales = self._scales(entry, cut)
        for place, rows in self._laid(entry.codes, cut):
            columns = scales[place : place + len(rows)].repeat_interleave(entry.block.columns, 1)
            yield place, rows.float().mul_(columns[:, : rows.shape[1]])

    def _scales(self, entry: Fp8Entry, cut: slice) -> torch.Tensor:
        """Return the scales for an FP8 matrix's rows in `cut`, float32 [rows, blocks along k]."""
        every = [rows.float() for _, rows in self._laid(entry.scale, slice(0, entry.scale.shape[0]))]
        return torch.cat(every)[torch.arange(cut.start, cut.stop) // entry.block.rows]

    def _row_scales(self, name: str, entry: Fp8Entry) -> torch.Tensor:
        """Return the scales as `_scales` does, for this rank's rows and columns."""
        rows, columns = self._cut(name)
        if entry.has_row_scales:
            return self._scales(entry, rows).repeat(1, -(-(columns.stop - columns.start) // fp8.ROW_GROUP))
        size = entry.block.columns
        return self._scales(entry, rows)[:, columns.start // size : -(-columns.stop // size)]

    def _codes(self, name: str, entry: Fp8Entry) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield an FP8 matrix's codes, uint8 rows. Raises ModelError for a NaN."""
        rows, columns = self._cut(name)
        for place, values in self._laid(entry.codes, rows):
            codes = values.view(torch.uint8)[:, columns]
            if bool((codes.bitwise_and(0x7F) == 0x7F).any()):
                raise tensor_error(entry, "holds a NaN; download it again")
            yield place, codes

    def _laid(self, entry: TensorEntry, cut: slice, rows_in: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's rows in the stored dtype. The file may store the matrix transposed."""
        if isinstance(entry, TurnedEntry):
            return self._turned(entry, cut, rows_in)
        return self._mapped(entry, cut, rows_in)

    def _turned(self, entry: TurnedEntry, cut: slice, rows_in: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield rows from a matrix that is stored transposed."""
        k, width = entry.shape[1], entry.row_values
        lies = replace(entry.stacked, shape=(k, width), start=entry.start)
        step = max(1, PIECE_VALUES // k // rows_in) * rows_in
        for _, stored in self._mapped(lies, slice(0, k), rows_in=k):  # A single piece.
            for first in range(cut.start, cut.stop, step):
                columns = slice(entry.first + first, entry.first + min(first + step, cut.stop))
                # torch transposes only contiguous tensors fast, so the columns are copied first.
                yield first - cut.start, stored[:, columns].contiguous().t().contiguous()

    def _mapped(self, entry: TensorEntry, cut: slice, rows_in: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's rows as views into the file."""
        file, dtype = self._files[entry.path], STORED[entry.dtype]
        row_values = math.prod(entry.shape[1:])
        step = max(1, PIECE_VALUES // max(1, row_values) // rows_in) * rows_in
        for first in range(cut.start, cut.stop, step):
            count = min(step, cut.stop - first)
            start, size = entry.start + first * row_values * dtype.itemsize, count * row_values
            end = start + size * dtype.itemsize
            aligned = start % dtype.itemsize == 0
            memory = file.memory if aligned else bytearray(file.memory[start:end])
            rows = torch.frombuffer(memory, dtype=dtype, count=size, offset=start if aligned else 0)
            yield first - cut.start, rows.view(count, *entry.shape[1:])
            file.release(start, end - start)


def holds_codes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether matrices may be held as codes. In float32 only integer codes are possible."""
    library = native.load() if device.type == "cpu" else None
    if library is None:
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float32 and multiplies_float32(library))


@contextmanager
def open_reader(
    entries: dict[str, TensorEntry],
    device: torch.device,
    dtype: torch.dtype,
    part: Part = WHOLE,
    quantize: Coding | None = None,
    activations: Activations = "model",
) -> Iterator[WeightReader]:
    """Map the safetensors files that contain `entries`, and yield a reader. For the arguments, see
    WeightReader.

    The caller must have checked the tensors' names and shapes. `part.count` must divide each dimension that
    is cut. Raises ModelError if a file cannot be mapped or is too short.
    """
    files: dict[Path, MappedFile] = {}
    for entry in [each for whole in entries.values() for each in (whole, *whole.companions)]:
        if isinstance(entry, GGUFEntry):
            continue
        if entry.path not in files:
            files[entry.path] = MappedFile(entry.path)
        if entry.start + entry.num_bytes > len(files[entry.path].memory):
            raise ModelError(f"{entry.path} is cut short; download it again")
    yield WeightReader(entries, files, device, dtype, part, quantize, activations)

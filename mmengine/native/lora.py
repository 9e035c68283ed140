"""Adds LoRA adapters to linear layers on the CPU, with the kernels of src/layers/lora.h."""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmengine.native.dtypes import DTYPES
from mmengine.native.linear import packed_buffer

LANES = 16  # number of matrix rows that are packed side by side
DECODER_LINEARS = ("qkv", "out", "gate_up", "down")  # a decoder layer's linear layers, as in decoder.h


class LoraPart(NamedTuple):
    """A low-rank term, scale * (x a^T) b^T, for columns [offset, offset + n) of a layer's output."""

    a: Tensor  # [rank, k]
    b: Tensor  # [n, rank]
    offset: int
    scale: float


class _Part(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("rank", "n", "offset")),
        ("scale", ctypes.c_float),
    )


class _Lora(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.POINTER(_Part)),
        *((name, ctypes.c_int32) for name in ("num_parts", "k", "dtype")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_groups", ctypes.c_int32),
        ("starts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_linears", ctypes.c_int32),
        ("of", ctypes.c_void_p),
    )


class PackedAdapter:
    """An adapter for a list of linear layers, packed for the CPU kernels in float32 or bfloat16.

    All matrices must have the same dtype. They are copied to a single memory block in reading order, so that
    the CPU prefetches across matrices. A matrix that several parts of a layer share is stored once.
    """

    def __init__(self, linears: Iterable[Sequence[LoraPart]]) -> None:
        each_linear = [tuple(parts) for parts in linears]
        matrices = [each for parts in each_linear for each in _in_order(parts)]
        self._memory = packed_buffer(max(LANES, sum(map(_packed_bytes, matrices))))
        self._structures: list[ctypes.Array[_Part] | _Lora] = []
        self._used = 0
        addresses = [self._packed(parts) if parts else 0 for parts in each_linear]
        self.addresses = np.array(addresses, np.uintp)

    def _packed(self, parts: Sequence[LoraPart]) -> int:
        places = {id(matrix): self._put(matrix) for matrix in _in_order(parts)}
        structures = (_Part * len(parts))(
            *(
                _Part(places[id(a)], places[id(b)], a.shape[0], b.shape[0], offset, scale)
                for a, b, offset, scale in parts
            )
        )
        first = parts[0].a
        whole = _Lora(structures, len(parts), first.shape[1], DTYPES[first.dtype])
        self._structures += [structures, whole]
        return ctypes.addressof(whole)

    def _put(self, matrix: Tensor) -> int:
        """Pack a matrix [m, k] and return its address.

        The layout is [m / LANES][k / 2] blocks with LANES rows and two columns each, padded with zeros. A
        bfloat16 block is stored as [LANES][2], a float32 block as [2][LANES].
        """
        (m, k), size = matrix.shape, _packed_bytes(matrix)
        memory = self._memory[self._used : self._used + size]
        beside = 2 if matrix.dtype == torch.bfloat16 else 1
        padded = functional.pad(matrix, (0, k % 2, 0, -m % LANES))
        values = torch.from_numpy(memory).view(matrix.dtype)
        blocks = values.view(-1, padded.shape[1] // beside, LANES, beside)
        blocks[:] = padded.reshape(len(blocks), LANES, -1, beside).transpose(1, 2)
        self._used += size
        return int(memory.ctypes.data)


def _in_order(parts: Sequence[LoraPart]) -> list[Tensor]:
    """Return the distinct matrices of a linear layer's parts: first every a, then every b."""
    every = [*(part.a for part in parts), *(part.b for part in parts)]
    return list({id(matrix): matrix for matrix in every}.values())


def _packed_bytes(matrix: Tensor) -> int:
    """Return the matrix's packed size in bytes, a multiple of a cache line."""
    m, k = matrix.shape
    return -(-m // LANES) * LANES * (k + k % 2) * matrix.dtype.itemsize


class LoraStep:
    """A C structure with the adapters of one step. `address` is valid while this object lives.

    `groups`: adapters for the same linear layers, each with the int32 indices of its rows.
    """

    def __init__(self, groups: Sequence[tuple[PackedAdapter, np.ndarray]]) -> None:
        self._groups = groups
        self.num_linears = len(groups[0][0].addresses)
        self._starts = np.zeros(len(groups) + 1, np.int32)
        np.cumsum([len(rows) for _, rows in groups], out=self._starts[1:])
        self._rows = np.concatenate([rows for _, rows in groups], dtype=np.int32)
        self._of = np.concatenate([adapter.addresses for adapter, _ in groups])
        arrays = (self._starts.ctypes.data, self._rows.ctypes.data, self.num_linears, self._of.ctypes.data)
        self._c = _Step(len(groups), *arrays)
        self.address = ctypes.addressof(self._c)


def add_all(library: ctypes.CDLL, packed: PackedAdapter, x: Tensor, y: Tensor) -> None:
    """Multiply x [m, k] by the adapter's matrices for the first linear layer, and add the result to y [m, n].
    The values in each row must be contiguous. Raises MemoryError.
    """
    step = LoraStep([(packed, np.arange(len(x), dtype=np.int32))])
    failed = declare_functions(library).mm_lora_add(
        step.address, 0, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), DTYPES[y.dtype]
    )
    if failed:
        raise MemoryError(f"not enough memory for an adapter's sums over {len(x)} rows")


@cache
def declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.mm_lora_add.argtypes = (pointer, number, pointer, long, pointer, long, number)
    library.mm_lora_add.restype = number
    return library

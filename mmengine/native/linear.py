"""Linear layers with packed weights: the Python side of src/linear/linear.h."""

import ctypes
import enum
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmengine.native.blocks import BlockRun, ChunkedBlocks
from mmengine.native.dtypes import DTYPES

_HUGE = 2**21
GROUPS = (32, 64, 128, 256)  # allowed numbers of codes per scale, at most MM_MAX_GROUP


class Linear(ctypes.Structure):
    """The C structure mm_linear."""

    _fields_ = (
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("mins", ctypes.c_int32),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x_form", ctypes.c_int32),
        ("num_runs", ctypes.c_int32),
        ("runs", ctypes.POINTER(BlockRun)),
    )


def packed_buffer(num_bytes: int) -> np.ndarray:
    """Return zeroed memory, uint8 [num_bytes], aligned to 64 bytes.

    A buffer of 2 MiB or more uses huge pages if the system has them. The buffer's end, which does not
    fill a huge page, uses small pages.
    """
    if num_bytes < _HUGE:
        buffer = np.zeros(num_bytes + 64, dtype=np.uint8)
        start = -buffer.ctypes.data % 64
        return buffer[start : start + num_bytes]
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    start, whole = -buffer.ctypes.data % _HUGE, num_bytes // _HUGE * _HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
        memory.madvise(mmap.MADV_NOHUGEPAGE, start + whole, len(memory) - start - whole)
    return buffer[start : start + num_bytes]


@dataclass(frozen=True, slots=True)
class ChunkedWeight:
    """A weight [n, k] that is delivered in chunks, so that the unpacked weight is never in memory as a whole.

    A chunk is a pair: the index of its first row, and rows [m, k] of type `dtype` on the CPU. The chunks can
    be read only once.
    """

    n: int
    k: int
    dtype: torch.dtype
    chunks: Iterable[tuple[int, Tensor]]

    @classmethod
    def of(cls, weight: Tensor) -> "ChunkedWeight":
        """Wrap a weight tensor as one chunk. Raises ValueError for a weight that cannot be packed."""
        if weight.dtype not in DTYPES or weight.dim() != 2 or weight.device.type != "cpu":
            raise ValueError(
                f"a weight to pack is float32 or bfloat16 [n, k] on the CPU, not {_text(weight)}"
            )
        n, k = weight.shape
        return cls(n, k, weight.dtype, [(0, weight)])


class Form(enum.IntEnum):
    """A weight's format: e4m3 codes, integer codes with 8 or 4 bits, or GGUF blocks. The values match the
    kernels' enum.
    """

    FP8 = 1
    INT8 = 2
    INT4 = 3
    BLOCKS = 4  # ChunkedBlocks


class RowForm(enum.IntEnum):
    """The format to which the kernels convert rows of x. The values match the kernels' enum."""

    FLOAT = 0  # float32 or bfloat16
    INT8 = 2
    INT16 = 5


class Codes(NamedTuple):
    """Rows of a weight as codes, one byte per code.

    `values` [m, k]: uint8 for FP8 (e4m3 without NaN), int8 from -127 to 127 for INT8, int8 from -8 to 7 for
    INT4. `scales`: float32 [m, ceil(k / group)]; float16 must be able to represent the scales of INT8 and
    INT4. `mins`: None, or for integer codes float32 minimums with the shape of `scales`. The weight is code *
    scale + minimum.
    """

    values: Tensor
    scales: Tensor
    mins: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChunkedCodes:
    """A weight [n, k] that is stored as codes and delivered in chunks. `dtype`: the layer's dtype.

    `group` consecutive codes along k share a scale and, if `mins` is true, a minimum. GROUPS lists the
    allowed group sizes. `row_form` (INT8 and INT4 only): the type to which the kernels convert x before they
    multiply. With an integer type, each 32 values in a row share a scale. RowForm.INT16 requires INT8 in
    groups of 32 without minimums, on a CPU where `multiplies_int16` is true. A float32 layer requires INT8 or
    INT4 with RowForm.FLOAT, on a CPU where `multiplies_float32` is true.
    """

    n: int
    k: int
    form: Form
    group: int
    chunks: Iterable[tuple[int, Codes]]
    mins: bool = False
    row_form: RowForm = RowForm.FLOAT
    dtype: torch.dtype = torch.bfloat16


AnyWeight = ChunkedWeight | ChunkedCodes | ChunkedBlocks


def multiplies_float32(library: ctypes.CDLL) -> bool:
    """Return whether float32 layers may have INT8 or INT4 codes. The result is True on CPUs without bfloat16
    instructions.
    """
    return bool(library.mm_linear_codes_fp32())


def multiplies_int16(library: ctypes.CDLL) -> bool:
    """Return whether layers may have RowForm.INT16. The result is True on CPUs with AVX-512 VNNI."""
    return bool(library.mm_linear_int16())


def prefers_int16(library: ctypes.CDLL) -> bool:
    """Return whether RowForm.INT16 is faster than RowForm.FLOAT for INT8 weights."""
    return bool(library.mm_linear_prefers_int16())


def structure(weight: AnyWeight, bias: int | None = None) -> Linear:
    """Return the C structure for a layer whose weight is not packed yet. `bias`: address of the bias."""
    if isinstance(weight, ChunkedBlocks):
        runs = weight.run_array()
        numbers = (DTYPES[weight.dtype], int(Form.BLOCKS), 0, False)
        return Linear(weight.n, weight.k, *numbers, None, bias, 0, len(runs), runs)
    form, group, mins, x_form = 0, 0, False, 0
    if isinstance(weight, ChunkedCodes):
        form, group, mins = int(weight.form), weight.group, weight.mins
        x_form = int(weight.row_form)
    return Linear(weight.n, weight.k, DTYPES[weight.dtype], form, group, mins, None, bias, x_form)


def packed_bytes(library: ctypes.CDLL, weight: AnyWeight) -> int:
    """Return the size of a weight after packing, in bytes."""
    c = structure(weight)
    return int(declare_functions(library).mm_linear_bytes(ctypes.addressof(c)))


def pack_rows(library: ctypes.CDLL, c: Linear, weight: AnyWeight, half: int) -> None:
    """Pack all chunks of a weight into the zeroed memory at `c.packed`. `half`: the number of gate's rows in
    a weight for gate and up, otherwise 0.
    """
    for first, rows in weight.chunks:
        of = rows if isinstance(rows, Codes) else (rows,)
        values, *shared = [None if each is None else each.contiguous() for each in of]
        assert values is not None
        scales, mins = ((each if each is None else each.data_ptr()) for each in (*shared, None, None)[:2])
        library.mm_linear_pack(
            ctypes.addressof(c), values.data_ptr(), scales, mins, first, len(values), half, c.packed
        )


class PackedLinear:
    """A linear layer y = x w^T + bias in float32 or bfloat16, whose weight w [n, k] is packed once.

    With `gate_up`, w consists of gate's rows, then up's rows, and y = silu(x gate^T) * (x up^T), [m, n / 2].
    The layer keeps no reference to `weight`.

    Rounding:
    - A bfloat16 layer sums in float32 and rounds the sum. It rounds again after silu and after adding a
      residual.
    - FP8: the same bits as a bfloat16 layer with the weight bfloat16(code * scale).
    - INT8 and INT4: the sum of each group is scaled in float32. A CPU with AMX instead rounds the decoded
      weights to bfloat16, as for FP8. With a `row_form` of integers, y has the same bits on every
      CPU.
    - ChunkedBlocks: a float32 layer gives the same bits as with the decoded weights. A bfloat16 layer rounds
      as an INT8 layer does on the same CPU. With `gate_up`, all blocks must have the same type.

    Raises ValueError for shapes and dtypes that do not fit, and MemoryError when scratch memory for bfloat16
    rows cannot be allocated.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor | AnyWeight,
        bias: Tensor | None = None,
        *,
        gate_up: bool = False,
    ) -> None:
        if isinstance(weight, Tensor):
            weight = ChunkedWeight.of(weight)
        self._library = declare_functions(library)
        n, self.dtype = weight.n, weight.dtype
        if bias is not None and bias.shape != (n,):
            raise ValueError(f"the bias is {list(bias.shape)}, the weight has {n} rows")
        if gate_up and isinstance(weight, ChunkedBlocks) and len(weight.runs) > 1:
            raise ValueError("gate and up have blocks of different types")
        self._gate_up, half = gate_up, n // 2 if gate_up else 0
        self._width = half or n
        self._bias = None if bias is None else bias.float().contiguous()
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._run, self._run_gate_up = self._library.mm_linear_run, self._library.mm_linear_gate_up
        self.c = structure(weight, bias_address)
        self._k = weight.k
        self._address = ctypes.addressof(self.c)
        self._packed = packed_buffer(self._library.mm_linear_bytes(self._address))
        self.c.packed = self._packed.ctypes.data
        pack_rows(self._library, self.c, weight, half)

    def __call__(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        float32: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return y [m, n] for x [m, k], which has the weight's dtype.

        `float32`: y is float32. `out`: tensor that receives y. `residual`: added to y; must have y's shape,
        dtype and stride, and may be `out`. A row's values must be contiguous; rows may be strided.
        """
        # Python's overhead is as long as a small product, so shape and stride are read only once.
        shape, stride = x.shape, x.stride()
        m, width, k = shape[0], self._width, self._k
        dtype = torch.float32 if float32 else self.dtype
        if shape != (m, k) or x.dtype != self.dtype or (m and k and stride[1] != 1):
            raise ValueError(f"x is {_text(x)}, wanted {self.dtype} [m, {k}] with contiguous rows")
        if out is None:
            y, row = torch.empty((m, width), dtype=dtype), width
        else:
            y, row = out, out.stride(0)
            self._check_like("out", y, m, dtype, row)
        if residual is not None:
            self._check_like("residual", residual, m, dtype, row)
        if self._gate_up:
            if residual is not None or float32:
                raise ValueError("a layer with gate_up supports neither a residual nor a float32 result")
            failed = self._run_gate_up(self._address, x.data_ptr(), stride[0], m, y.data_ptr(), row, None)
        else:
            added = None if residual is None else residual.data_ptr()
            failed = self._run(self._address, x.data_ptr(), stride[0], m, y.data_ptr(), row, float32, added)
        if failed:
            raise MemoryError(f"not enough memory to run a linear layer on {m} rows")
        return y

    def _check_like(self, name: str, y: Tensor, m: int, dtype: torch.dtype, stride: int) -> None:
        fits = y.shape == (m, self._width) and y.dtype == dtype
        if not fits or (m > 1 and y.stride() != (stride, 1)):
            raise ValueError(f"{name} is {_text(y)}, wanted {dtype} [{m}, {self._width}] with y's stride")

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of w, [m, k], for `indices`, int64 [m]. An index out of range gives zeros."""
        indices = indices.contiguous()
        if indices.dtype != torch.int64 or indices.dim() != 1:
            raise ValueError(f"indices are {_text(indices)}, wanted int64 [m]")
        out = torch.empty((len(indices), self.c.k), dtype=self.dtype)
        self._library.mm_linear_rows(self._address, indices.data_ptr(), len(indices), out.data_ptr())
        return out


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@cache
def declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    arguments = {
        "bytes": (pointer,),
        "pack": (pointer, pointer, pointer, pointer, number, number, number, pointer),
        "rows": (pointer, pointer, number, pointer),
        "run": (pointer, pointer, long, number, pointer, long, number, pointer),
        "gate_up": (pointer, pointer, long, number, pointer, long, pointer),
    }
    for name, types in arguments.items():
        function = getattr(library, f"mm_linear_{name}")
        function.argtypes, function.restype = types, None
    library.mm_linear_bytes.restype = long
    library.mm_linear_run.restype = library.mm_linear_gate_up.restype = number
    return library

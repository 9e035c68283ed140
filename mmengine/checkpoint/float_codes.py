"""Reads quantised matrices with floating-point codes, as compressed-tensors and ModelOpt store them. Does not
import torch.

A matrix `X.weight` [out, in] has one of two forms. Tensor names and dtypes show the form, so a folder may mix
both:

* FP8: `X.weight` has e4m3 codes. `X.weight_scale` has a scale for each row ([out, 1] or [out]), for each
  block (compressed-tensors' `block_structure`), or for the matrix ([1] or scalar). A weight is code * scale.
* NVFP4: each byte has two e2m1 codes, the first in the low four bits. The scales are `X.weight_scale` e4m3
  [out, in / 16] and a global float32 scale. compressed-tensors stores the codes in `X.weight_packed` uint8
  [out, in / 2] and the global scale in `X.weight_global_scale`. A weight is code * (scale / global scale).
  ModelOpt uses the names `X.weight` and `X.weight_scale_2`, and a weight is code * (scale * global scale).

Scales for inputs and for the KV cache are ignored: inputs are not quantised here, and an FP8 KV cache has no
scales. Formats: https://github.com/vllm-project/compressed-tensors,
https://github.com/NVIDIA/Model-Optimizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from mmengine.checkpoint import fp8
from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.files import read_range
from mmengine.checkpoint.float_values import read_floats, read_scales
from mmengine.checkpoint.fp8 import Block, Fp8Entry
from mmengine.checkpoint.tensors import TensorEntry, tensor_error

Layout = Literal["compressed-tensors", "modelopt"]
BYTES = "U8"
STORED_BYTES = {BYTES: 1}
GROUP = 16  # Number of values that share a scale in NVFP4.
PIECE_ROWS = 16  # Rows are decoded in multiples of this number.
PIECE_VALUES = 2**22  # Approximate maximum number of values in a decoded piece.
# Values of `format` in compressed-tensors folders whose matrices may be FP8, NVFP4 or unquantised.
FORMATS = ("float-quantized", "nvfp4-pack-quantized", "mixed-precision", "dense")
# Values of `quant_algo` in ModelOpt folders whose matrices may be FP8, NVFP4 or unquantised.
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")  # Values of quant_method in folders of ModelOpt.
_CODES: dict[Layout, str] = {"compressed-tensors": "weight_packed", "modelopt": "weight"}
_GLOBAL: dict[Layout, str] = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}
_SCALE = "weight_scale"
# Supported combinations of type, num_bits and strategy for the weights in a compressed-tensors group.
_SUPPORTED = tuple(("float", 8, each) for each in ("channel", "tensor", "block")) + (
    ("float", 4, "tensor_group"),
)
_UNUSED = ("input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PAIRS = np.stack(  # [256, 2]: the two values of a byte.
    [np.concatenate((_E2M1, -_E2M1))[(np.arange(256) >> shift) & 15] for shift in (0, 4)], 1
)


def _e4m3_values() -> np.ndarray:
    """Return the value of each e4m3 code, float32 [256]; the codes of NaN have wrong values."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, (codes & 7) / 8
    values = (fractions + (exponents > 0)) * 2.0 ** (np.maximum(exponents, 1) - 7)
    return np.where(codes < 128, values, -values).astype(np.float32)


_E4M3 = _e4m3_values()


class FloatCodes(NamedTuple):
    """How a folder's matrices are stored. `block`: the size of a block with a single scale, for FP8 matrices
    with block scales; otherwise None.
    """

    layout: Layout
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class NvFp4Entry(TensorEntry):
    """An NVFP4 matrix. `shape` is the shape [out, in] of the matrix. The other inherited fields describe the
    tensor with the codes. `factor`: the global scale. A weight is code * (scale * factor), or code * (scale /
    factor) if `divides` is true.
    """

    codes: TensorEntry
    scale: TensorEntry
    global_scale: TensorEntry
    factor: float
    divides: bool

    @property
    def is_decoded(self) -> bool:
        return True

    @property
    def form_name(self) -> str:
        return "NVFP4"

    @property
    def companions(self) -> tuple[TensorEntry, ...]:
        return (self.scale, self.global_scale)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the rows [begin, end) in pieces: (row offset from `begin`, float32 weights). Raises
        ModelError for a NaN scale.
        """
        columns = self.shape[1]
        step = max(1, PIECE_VALUES // columns // PIECE_ROWS) * PIECE_ROWS
        for first in range(begin, end, step):
            count = min(step, end - first)
            values = _PAIRS[_bytes(self.codes, first, count)].reshape(count, -1, GROUP)
            scales = _e4m3(self.scale, first, count)
            factor = np.float32(self.factor)
            scales = scales / factor if self.divides else scales * factor
            yield first - begin, (values * scales[:, :, None]).reshape(count, columns)


def layout_of(how: Fields) -> FloatCodes | None:
    """Return how the matrices are stored, or None if this module does not read the quant_method or format.

    Raises ModelError for an unsupported algorithm or weight type.
    """
    method = how.values.get("quant_method")
    if method is None or method in METHODS:
        algorithm = str(how.values.get("quant_algo")).upper()
        if algorithm not in ALGORITHMS:
            how.fail(f"{how.prefix}quant_algo {repr(algorithm)[:60]} is not supported")
        return FloatCodes("modelopt")
    if method != "compressed-tensors" or how.values.get("format") not in FORMATS:
        return None
    groups = how.child("config_groups")
    blocks = {_block_of(groups.child(name)) for name in groups.values} - {None}
    if len(blocks) > 1:
        groups.fail(f"{groups.prefix[:-1]} has several block_structure values; only one is supported")
    return FloatCodes("compressed-tensors", blocks.pop() if blocks else None)


def _block_of(group: Fields) -> Block | None:
    """Check a group's weights, and return their block size if they have block scales."""
    weights = group.child("weights")
    found = tuple(weights.values.get(name) for name in ("type", "num_bits", "strategy"))
    if found not in _SUPPORTED:
        kind, bits, strategy = found
        weights.fail(
            f"{weights.prefix[:-1]} has type {repr(kind)[:40]}, num_bits {repr(bits)[:40]} and strategy "
            f"{repr(strategy)[:40]}, which is not supported"
        )
    if not weights.flag("symmetric", True):
        weights.fail(f"{weights.prefix}symmetric is false, which is not supported for float codes")
    size = weights.values.get("group_size")
    if found[1] == 4 and size not in (None, GROUP):
        weights.fail(f"{weights.prefix}group_size {repr(size)[:60]} is not supported, only {GROUP}")
    return fp8.read_block(weights, "block_structure") if found[2] == "block" else None


def with_codes(entries: dict[str, TensorEntry], how: FloatCodes) -> dict[str, TensorEntry]:
    """Return the tensors by canonical name. Each quantised matrix becomes a single entry, which includes its
    scales and its global scale.

    Reads the scales of FP8 matrices and the global scales from the files, but no codes. Raises ModelError if
    a tensor that belongs to a matrix is missing or does not fit.
    """
    made, used = dict[str, TensorEntry](), set[str]()
    codes = f".{_CODES[how.layout]}"
    for name, entry in entries.items():
        if name.endswith(codes) and (entry.dtype == BYTES or codes != ".weight"):
            module = name.removesuffix(codes[1:])
            names = [f"{module}{each}" for each in (_SCALE, _GLOBAL[how.layout])]
            scale, global_scale = (_needed(entry, entries, each, "NVFP4") for each in names)
            used |= {name, *names}
            made[f"{module}weight"] = _nvfp4(entry, scale, global_scale, how)
        elif name.endswith(".weight") and entry.dtype == fp8.STORED:
            scale = _needed(entry, entries, f"{name}_scale", "FP8")
            used |= {name, f"{name}_scale"}
            made[name] = _fp8(entry, scale, how.block)
    kept = {
        name: entry
        for name, entry in entries.items()
        if name not in used and name.rpartition(".")[2] not in _UNUSED
    }
    for name, entry in kept.items():
        if name.endswith(f".{_SCALE}"):
            raise tensor_error(entry, "is a scale, but its weight is no matrix of codes; download it again")
        if entry.dtype == fp8.STORED:
            raise tensor_error(entry, f"is stored as {fp8.STORED}, but belongs to no matrix")
    return kept | made


def check_bytes(entries: dict[str, TensorEntry]) -> None:
    """Raise ModelError for a uint8 tensor that belongs to no NVFP4 matrix."""
    for entry in entries.values():
        if entry.dtype == BYTES and not isinstance(entry, NvFp4Entry):
            raise tensor_error(entry, f"is stored as {BYTES}, but belongs to no NVFP4 matrix")


def _needed(codes: TensorEntry, entries: dict[str, TensorEntry], name: str, form: str) -> TensorEntry:
    if (entry := entries.get(name)) is None:
        ending = name.rpartition(".")[2]
        missing = f"{codes.stored_name.rpartition('.')[0]}.{ending}"
        raise tensor_error(codes, f"has {form} codes, but {missing} is missing; download it again")
    return entry


def _nvfp4(codes: TensorEntry, scale: TensorEntry, global_scale: TensorEntry, how: FloatCodes) -> NvFp4Entry:
    if codes.dtype != BYTES:
        raise tensor_error(codes, f"is stored as {codes.dtype}; NVFP4 codes are {BYTES}")
    if len(codes.shape) != 2 or not all(codes.shape) or codes.shape[1] * 2 % GROUP:
        raise tensor_error(
            codes,
            f"has shape {list(codes.shape)}; NVFP4 codes are matrices of two codes a byte with rows of whole "
            f"groups of {GROUP} values",
        )
    rows, columns = codes.shape[0], codes.shape[1] * 2
    _check(scale, (fp8.STORED,), [(rows, columns // GROUP)])
    _check(global_scale, ("F32",), [(), (1,)])
    factor = float(read_floats(global_scale).item())
    if not np.isfinite(factor) or factor == 0:
        raise tensor_error(
            global_scale, f"is {factor}; a global scale is finite and not 0; download it again"
        )
    layout = (codes.path, codes.stored_name, codes.dtype, (rows, columns), codes.start, codes.num_bytes)
    divides = how.layout == "compressed-tensors"
    return NvFp4Entry(*layout, codes, scale, global_scale, factor, divides)


def _fp8(codes: TensorEntry, scale: TensorEntry, block: Block | None) -> Fp8Entry:
    if len(codes.shape) != 2 or not all(codes.shape):
        raise tensor_error(codes, f"has shape {list(codes.shape)}; FP8 weights are matrices")
    rows, columns = codes.shape
    shapes: dict[tuple[int, ...], Block] = {(rows, 1): Block(1, columns), (rows,): Block(1, columns)}
    shapes |= dict.fromkeys(((), (1,), (1, 1)), Block(rows, columns))
    if block is not None:
        shapes[-(-rows // block.rows), -(-columns // block.columns)] = block
    _check(scale, ("BF16", "F16", "F32"), list(shapes))
    read_scales(scale)  # Only to check that the scales are finite.
    sizes = shapes[scale.shape]
    matrix = -(-rows // sizes.rows), -(-columns // sizes.columns)
    return fp8.scaled(codes, replace(scale, shape=matrix), sizes)


def _check(entry: TensorEntry, dtypes: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    if entry.dtype not in dtypes or entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise tensor_error(
            entry,
            f"is {entry.dtype} {list(entry.shape)}; it must be {' or '.join(dtypes)} {wanted}",
        )


def _bytes(entry: TensorEntry, first: int, count: int) -> np.ndarray:
    """Return rows [first, first + count) of a matrix with one byte per value, uint8."""
    columns = entry.shape[1]
    what = f"tensor {entry.stored_name}"
    data = read_range(entry.path, entry.start + first * columns, count * columns, what)
    return np.frombuffer(data, np.uint8).reshape(count, columns)


def _e4m3(entry: TensorEntry, first: int, count: int) -> np.ndarray:
    """Return rows of an e4m3 matrix as float32. Raises ModelError for a NaN."""
    codes = _bytes(entry, first, count)
    if ((codes & 0x7F) == 0x7F).any():
        raise tensor_error(entry, "holds a scale that is not a number; download it again")
    return _E4M3[codes]

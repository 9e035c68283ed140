"""FP8 weights in blocks, as the hub's `*-FP8` folders hold them. No torch here.

`quant_method` "fp8" of transformers: beside a matrix `X.weight` of e4m3 values [out, in] stands
`X.weight_scale_inv` with a scale for each block of `weight_block_size` rows and columns; those at the ends
may have fewer. Despite the name of the scales a weight is its value times its scale. What a folder leaves as
it is (`modules_to_not_convert`) has none. Of stacked experts, `X.gate_up_proj` [count, ...], scales are
`X.gate_up_proj_scale_inv`, those of each matrix as it lies there (Qwen3-VL-30B-A3B-Instruct-FP8).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.files import read_range
from mmengine.checkpoint.tensors import FLOAT_BYTES, Coding, TensorEntry
from mmengine.errors import ModelError

METHOD, STORED = "fp8", "F8_E4M3"
STORED_BYTES = {**FLOAT_BYTES, STORED: 1}
_SCALE = "_scale_inv"  # behind the name of what it scales
MAX_BLOCK = 2**14  # rows or columns of a block


class Block(NamedTuple):
    """Of a matrix, that share a scale."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Fp8Entry(TensorEntry):
    """A matrix of e4m3 values, or a stack of them. `codes`: how they lie. `scale`: of each one's blocks,
    [ceil(out / rows), ceil(in / columns)]."""

    codes: TensorEntry
    scale: TensorEntry
    block: Block

    @property
    def coding(self) -> Coding:
        return Coding("fp8", self.block.columns)

    @property
    def beside(self) -> tuple[TensorEntry, ...]:
        return (self.scale, *self.scale.beside, *self.codes.beside)


def block_of(how: Fields) -> Block:
    """Of a quantization_config. ModelError for what is not read."""
    if how.values.get("weight_block_size") is None:
        how.fail("quantization_config has no weight_block_size")
    scheme = how.values.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        how.fail(
            f"quantization_config.activation_scheme {repr(scheme)[:60]} is not supported, only dynamic: "
            "activations stay as they are here"
        )
    sizes = how.integers("weight_block_size", None, 1, MAX_BLOCK, 2)
    if len(sizes) != 2:
        how.fail(f"quantization_config.weight_block_size has {len(sizes)} sizes; rows and columns are wanted")
    return Block(*sizes)


def with_scales(folder: Path, entries: dict[str, TensorEntry], block: Block | None) -> dict[str, TensorEntry]:
    """Tensors of a folder, by canonical name: matrices of FP8 have their scales, which are no entries of
    their own. `block`: as its config.json has it. Raises ModelError where one is without the other, or they
    do not fit; nothing is read but scales."""
    names = [name for name, entry in entries.items() if entry.dtype == STORED]
    scales = {name for name in entries if name.endswith(_SCALE)}
    if not names and not scales:
        return entries
    found = {name: entry for name, entry in entries.items() if name not in scales}
    for name in names:
        entry, scale = entries[name], entries.get(f"{name}{_SCALE}")
        if block is None:
            raise _wrong(entry, f"is stored as {STORED}, and {folder / 'config.json'} says nothing of FP8")
        if scale is None:
            scale_name = f"{entry.stored_name}{_SCALE}"
            raise _wrong(entry, f"is stored as {STORED}, and there is no {scale_name}; download it again")
        found[name] = _joined(entry, scale, block)
    for name in sorted(scales):
        weight = entries.get(name.removesuffix(_SCALE))
        if weight is None or weight.dtype != STORED:
            raise _wrong(entries[name], "is a scale, and its weight is no FP8 matrix; download it again")
    return found


def _joined(entry: TensorEntry, scale: TensorEntry, block: Block) -> Fp8Entry:
    if len(entry.shape) not in (2, 3):
        raise _wrong(entry, f"has shape {list(entry.shape)}; FP8 weights are matrices, or stacks of them")
    *count, rows, columns = entry.shape
    wanted = (*count, -(-rows // block.rows), -(-columns // block.columns))
    if scale.shape != wanted:
        raise _wrong(
            scale,
            f"has shape {list(scale.shape)}; a weight of {list(entry.shape)} in blocks of {list(block)} has "
            f"{list(wanted)} scales",
        )
    if scale.dtype not in ("BF16", "F32"):
        raise _wrong(scale, f"is stored as {scale.dtype}; scales are BF16 or F32")
    if not _are_finite(scale):
        raise _wrong(scale, "holds a scale that is no finite number; download it again")
    return scaled(entry, scale, block)


def scaled(codes: TensorEntry, scale: TensorEntry, block: Block) -> Fp8Entry:
    """What they are together."""
    of = (codes.path, codes.stored_name, codes.dtype, codes.shape, codes.start, codes.num_bytes)
    return Fp8Entry(*of, codes, scale, block)


def _are_finite(scale: TensorEntry) -> bool:
    data = read_range(scale.path, scale.start, scale.num_bytes, f"tensor {scale.stored_name}")
    if scale.dtype == "F32":
        return bool(np.isfinite(np.frombuffer(data, "<f4")).all())
    exponent = 0x7F80  # of a bfloat16, all ones where it is infinite or none
    return bool((np.frombuffer(data, "<u2") & exponent != exponent).all())


def _wrong(entry: TensorEntry, what: str) -> ModelError:
    return ModelError(f"{entry.path}: tensor {entry.stored_name} {what}")

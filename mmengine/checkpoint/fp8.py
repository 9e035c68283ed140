"""Reads FP8 weights with block scales, as in the `*-FP8` folders of the hub. Does not import torch.

In transformers' `quant_method` "fp8", a matrix `X.weight` of e4m3 values [out, in] comes with a matrix
`X.weight_scale_inv`: one scale for each block of `weight_block_size` rows and columns. The last blocks may be
smaller. Despite "inv" in the name, a weight is the stored value, multiplied by the block's scale. Unquantised
modules (`modules_to_not_convert`) have no scales. The scales of stacked experts `X.gate_up_proj` [count, ...]
are `X.gate_up_proj_scale_inv`, stacked like the matrices (Qwen3-VL-30B-A3B-Instruct-FP8).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.float_values import read_scales
from mmengine.checkpoint.tensors import FLOAT_BYTES, Coding, TensorEntry, tensor_error

ROW_GROUP = 128  # In memory, a row's single scale is stored once for every ROW_GROUP values.
METHOD, STORED = "fp8", "F8_E4M3"
STORED_BYTES = {**FLOAT_BYTES, STORED: 1}
_SCALE = "_scale_inv"  # A scale is named like its weight, with this suffix.
MAX_BLOCK = 2**14  # Maximum number of rows, and of columns, in a block.


class Block(NamedTuple):
    """The size of a block of weights that share a scale."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Fp8Entry(TensorEntry):
    """An e4m3 matrix, or a stack of such matrices.

    `codes`: where the values are stored. `scale`: where the block scales are stored, [ceil(out / rows),
    ceil(in / columns)] for each matrix.
    """

    codes: TensorEntry
    scale: TensorEntry
    block: Block

    @property
    def coding(self) -> Coding:
        return Coding("fp8", ROW_GROUP if self.has_row_scales else self.block.columns)

    @property
    def has_row_scales(self) -> bool:
        """Return whether all values in a row share a scale."""
        return self.block.columns >= self.shape[-1]

    @property
    def companions(self) -> tuple[TensorEntry, ...]:
        return (self.scale, *self.scale.companions, *self.codes.companions)


def block_of(how: Fields) -> Block:
    """Return the block size in a quantization_config. Raises ModelError for unsupported options."""
    if how.values.get("weight_block_size") is None:
        how.fail("quantization_config has no weight_block_size")
    scheme = how.values.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        how.fail(
            f"quantization_config.activation_scheme {repr(scheme)[:60]} is not supported, only dynamic: "
            "activations are not quantised here"
        )
    return read_block(how, "weight_block_size")


def read_block(fields: Fields, name: str) -> Block:
    """Return the block size in a field. Raises ModelError."""
    sizes = fields.integers(name, None, 1, MAX_BLOCK, 2)
    if len(sizes) != 2:
        fields.fail(f"{fields.prefix}{name} has {len(sizes)} sizes; it must have two, rows and columns")
    return Block(*sizes)


def with_scales(folder: Path, entries: dict[str, TensorEntry], block: Block | None) -> dict[str, TensorEntry]:
    """Return the tensors by canonical name. An Fp8Entry replaces each FP8 matrix and its scales.

    `block`: the block size from config.json, or None for an unquantised folder. Raises ModelError if a matrix
    or its scales are missing, or do not fit each other. Reads the scales from the files, but no other data.
    """
    names = [name for name, entry in entries.items() if entry.dtype == STORED]
    scales = {name for name in entries if name.endswith(_SCALE)}
    if not names and not scales:
        return entries
    found = {name: entry for name, entry in entries.items() if name not in scales}
    for name in names:
        entry, scale = entries[name], entries.get(f"{name}{_SCALE}")
        if block is None:
            raise tensor_error(
                entry, f"is stored as {STORED}, but {folder / 'config.json'} has no FP8 quantization_config"
            )
        if scale is None:
            scale_name = f"{entry.stored_name}{_SCALE}"
            raise tensor_error(
                entry, f"is stored as {STORED}, but {scale_name} is missing; download it again"
            )
        found[name] = _joined(entry, scale, block)
    for name in sorted(scales):
        weight = entries.get(name.removesuffix(_SCALE))
        if weight is None or weight.dtype != STORED:
            raise tensor_error(
                entries[name], "is a scale, but its weight is not an FP8 matrix; download it again"
            )
    return found


def _joined(entry: TensorEntry, scale: TensorEntry, block: Block) -> Fp8Entry:
    if len(entry.shape) not in (2, 3):
        raise tensor_error(
            entry, f"has shape {list(entry.shape)}; FP8 weights are matrices, or stacks of them"
        )
    *count, rows, columns = entry.shape
    wanted = (*count, -(-rows // block.rows), -(-columns // block.columns))
    if scale.shape != wanted:
        raise tensor_error(
            scale,
            f"has shape {list(scale.shape)}; a weight of {list(entry.shape)} in blocks of {list(block)} has "
            f"{list(wanted)} scales",
        )
    if scale.dtype not in ("BF16", "F32"):
        raise tensor_error(scale, f"is stored as {scale.dtype}; scales are BF16 or F32")
    read_scales(scale)  # Only to check that the scales are finite.
    return scaled(entry, scale, block)


def scaled(codes: TensorEntry, scale: TensorEntry, block: Block) -> Fp8Entry:
    """Return the entry of a matrix, or of a stack of matrices, with these codes and scales."""
    of = (codes.path, codes.stored_name, codes.dtype, codes.shape, codes.start, codes.num_bytes)
    return Fp8Entry(*of, codes, scale, block)

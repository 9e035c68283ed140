"""Reads stacked experts from a tensor, and returns a separate matrix for each expert. Does not import torch.

transformers stacks experts as `X.gate_up_proj` [count, 2 * size, hidden] and `X.down_proj` [count, hidden,
size]. In `X.gate_up_proj`, gate's rows precede up's rows. Some hub folders store each matrix transposed, and
this module detects the transposition by the shape. Like transformers' `conversion_mapping.py`, this module
assumes that a square matrix is not transposed. FP8 scales are stacked and transposed like the matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mmengine.checkpoint.fp8 import Block, Fp8Entry, scaled
from mmengine.checkpoint.tensors import TensorEntry
from mmengine.errors import ModelError

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True, slots=True)
class TurnedEntry(TensorEntry):
    """A matrix [n, k] that is stored transposed.

    From byte `start` on, the file stores k rows of `row_values` values. Column `first` + i of these rows is
    row i of the matrix. `stacked`: the tensor that contains the matrix.
    """

    first: int
    row_values: int
    stacked: TensorEntry

    @property
    def companions(self) -> tuple[TensorEntry, ...]:
        return (self.stacked,)


def each_expert(
    entries: dict[str, TensorEntry], count: int, hidden_size: int, intermediate_size: int
) -> dict[str, TensorEntry]:
    """Return the tensors by canonical name. Stacked experts become separate matrices [out, in], such as
    `X.experts.0.gate_proj.weight`. Raises ModelError if a stack's shape does not match `count` and the sizes.
    """
    found = dict(entries)
    parts: tuple[str, ...]
    for name, entry in entries.items():
        if name.endswith(f".{_GATE_UP}"):
            shape, parts = (count, 2 * intermediate_size, hidden_size), ("gate_proj", "up_proj")
        elif name.endswith(f".{_DOWN}"):
            shape, parts = (count, hidden_size, intermediate_size), ("down_proj",)
        else:
            continue
        whole = name.rpartition(".")[0]
        for i, part, matrix in _matrices(entry, shape, parts):
            found[f"{whole}.{i}.{part}.weight"] = matrix
        del found[name]
    return found


def _matrices(
    entry: TensorEntry, shape: tuple[int, int, int], parts: tuple[str, ...]
) -> Iterator[tuple[int, str, TensorEntry]]:
    count, rows, columns = shape
    if entry.shape not in (shape, (count, columns, rows)):
        raise ModelError(
            f"{entry.path}: tensor {entry.stored_name} has shape {list(entry.shape)}; config.json requires "
            f"{list(shape)}, or {[count, columns, rows]}"
        )
    is_turned, n = entry.shape != shape, rows // len(parts)
    for i in range(count):
        for place, part in enumerate(parts):
            yield i, part, _matrix(entry, i, slice(place * n, (place + 1) * n), is_turned)


def _matrix(entry: TensorEntry, i: int, rows: slice, is_turned: bool) -> TensorEntry:
    """Return `rows` of the matrix of expert `i`. If `is_turned`, these rows are columns in the file.

    Raises ModelError if `rows` share an FP8 scale with other rows.
    """
    if isinstance(entry, Fp8Entry):
        block = Block(*reversed(entry.block)) if is_turned else entry.block
        all_rows = entry.shape[2 if is_turned else 1]
        if any(edge % block.rows for edge in (rows.start, rows.stop) if edge != all_rows):
            raise ModelError(
                f"{entry.path}: tensor {entry.stored_name} has gate and up of {rows.stop} rows each, which "
                f"share a scale in blocks of {block.rows}; store each as a separate tensor"
            )
        blocks = slice(rows.start // block.rows, -(-rows.stop // block.rows))
        codes, scale = (
            _matrix(each, i, part, is_turned) for each, part in ((entry.codes, rows), (entry.scale, blocks))
        )
        return scaled(codes, scale, block)
    count, *shape = entry.shape
    expert_bytes = entry.num_bytes // count
    num_rows, columns = reversed(shape) if is_turned else shape
    part_bytes = expert_bytes * (rows.stop - rows.start) // num_rows
    start = entry.start + i * expert_bytes
    of = (entry.path, entry.stored_name, entry.dtype, (rows.stop - rows.start, columns))
    if is_turned:
        return TurnedEntry(*of, start, part_bytes, rows.start, num_rows, entry)
    return TensorEntry(*of, start + expert_bytes * rows.start // num_rows, part_bytes)

"""Experts that a file holds as one tensor, seen as matrices of their own. No torch here.

transformers stacks them as `X.gate_up_proj` [count, 2 * size, hidden], gate's rows and then up's, and
`X.down_proj` [count, hidden, size]; some folders of the hub have each of these turned. The shape says which;
what fits both is not turned (`conversion_mapping.py` of transformers).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mmengine.checkpoint.tensors import TensorEntry
from mmengine.errors import ModelError

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True, slots=True)
class TurnedEntry(TensorEntry):
    """A matrix [n, k] that is stored as columns: `first` and those behind it of k rows of `row_values`, which
    begin at `start`. `stacked`: the tensor that they are of."""

    first: int
    row_values: int
    stacked: TensorEntry

    @property
    def beside(self) -> tuple[TensorEntry, ...]:
        return (self.stacked,)


def each_expert(
    entries: dict[str, TensorEntry], count: int, hidden_size: int, intermediate_size: int
) -> dict[str, TensorEntry]:
    """Tensors by canonical name, with those of stacked experts as matrices [out, in] of their own:
    `X.experts.0.gate_proj.weight`. ModelError for a stack of another shape."""
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
            f"{entry.path}: tensor {entry.stored_name} has shape {list(entry.shape)}; config.json asks for "
            f"{list(shape)}, or {[count, columns, rows]}"
        )
    expert_bytes, n = entry.num_bytes // count, rows // len(parts)
    part_bytes = expert_bytes // len(parts)
    for i in range(count):
        start = entry.start + i * expert_bytes
        for place, part in enumerate(parts):
            of = (entry.path, entry.stored_name, entry.dtype, (n, columns))
            if entry.shape == shape:
                yield i, part, TensorEntry(*of, start + place * part_bytes, part_bytes)
            else:
                yield i, part, TurnedEntry(*of, start, part_bytes, place * n, rows, entry)

"""Joins tensors that GGUF files store separately, such as the queries, keys and values of a vision tower."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmengine.checkpoint.gguf.tensors import GGUFEntry
from mmengine.checkpoint.tensors import Blocks, Coding, TensorEntry
from mmengine.errors import ModelError


@dataclass(frozen=True, slots=True)
class JoinedEntry(GGUFEntry):
    """A tensor whose rows are the rows of several stored tensors, one tensor after another."""

    parts: tuple[GGUFEntry, ...] = ()

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        row = 0  # Index of the part's first row in the joined tensor.
        for part in self.parts:
            first, last = max(begin - row, 0), min(end - row, part.shape[0])
            if first < last:
                for place, rows in part.pieces(first, last):
                    yield row + first + place - begin, rows
            row += part.shape[0]

    @property
    def coding(self) -> Coding | None:
        return None

    @property
    def blocks(self) -> Blocks | None:
        return None

    @property
    def companions(self) -> tuple[TensorEntry, ...]:
        return self.parts[1:]


def joined_entry(*parts: GGUFEntry) -> JoinedEntry:
    """Return one entry for several tensors. Raises ModelError if their rows have different shapes."""
    first = parts[0]
    if wrong := next((part for part in parts if part.shape[1:] != first.shape[1:]), None):
        raise ModelError(
            f"{wrong.path}: tensors {first.stored_name} and {wrong.stored_name} have shapes "
            f"{list(first.shape)} and {list(wrong.shape)}; rows of equal length are required"
        )
    return JoinedEntry(
        path=first.path,
        stored_name=first.stored_name,
        dtype=first.dtype,
        shape=(sum(part.shape[0] for part in parts), *first.shape[1:]),
        start=first.start,
        num_bytes=first.num_bytes,
        type=first.type,
        parts=parts,
    )

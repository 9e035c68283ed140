"""Weights from safetensors or GGUF onto a device: cast, and joined where the networks want one matrix.

Names and shapes are checked before anything is allocated (mmengine.checkpoint), so what a folder can make
this process allocate is bounded by the size of its files. At most one stored tensor is held beside the model.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mmengine.checkpoint.gguf.tensors import GGUFEntry
from mmengine.checkpoint.tensors import TensorEntry
from mmengine.errors import ModelError
from mmengine.models.progress import tell


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` equal ones of each tensor for which `axis_of` names a dimension."""

    index: int
    count: int
    axis_of: Callable[[str], int | None]


WHOLE = Part(0, 1, lambda name: None)


class WeightReader:
    """Reads tensors by canonical name onto `device` as `dtype`; of those that are cut, its part alone."""

    def __init__(
        self,
        entries: dict[str, TensorEntry],
        files: dict[Path, safe_open],
        device: torch.device,
        dtype: torch.dtype,
        part: Part = WHOLE,
    ) -> None:
        self._entries, self._files, self._device, self._dtype = entries, files, device, dtype
        self._part = part
        self._num_read, self._whole = 0, sum(entry.num_bytes for entry in entries.values())  # bytes

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, *names: str) -> torch.Tensor:
        """One tensor, or several joined along their first dimension."""
        shapes = [self._shape(name) for name in names]
        out = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), device=self._device, dtype=self._dtype
        )
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            for place, values in self._pieces(name):
                out[row + place : row + place + len(values)].copy_(values)
            row += shape[0]
            self._num_read += self._entries[name].num_bytes
        tell(self._num_read, self._whole)
        return out

    def _shape(self, name: str) -> tuple[int, ...]:
        shape, axis = list(self._entries[name].shape), self._part.axis_of(name)
        if axis is not None:
            shape[axis] //= self._part.count
        return tuple(shape)

    def same(self, first: str, second: str) -> bool:
        """Whether two stored tensors are equal, value for value."""
        if self._entries[first].shape != self._entries[second].shape:
            return False
        return torch.equal(self._stored(first), self._stored(second))

    def _pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensor, or the part of it, as rows with the place of their first: packed ones are decoded a
        piece at a time."""
        entry, axis = self._entries[name], self._part.axis_of(name)
        if not isinstance(entry, GGUFEntry):
            yield 0, self._stored(name)
            return
        cut = [slice(0, size) for size in entry.shape]
        if axis is not None:
            size = entry.shape[axis] // self._part.count
            cut[axis] = slice(self._part.index * size, (self._part.index + 1) * size)
        for place, values in entry.pieces(cut[0].start, cut[0].stop):
            yield place, torch.from_numpy(values)[(slice(None), *cut[1:])]

    def _stored(self, name: str) -> torch.Tensor:
        entry, axis = self._entries[name], self._part.axis_of(name)
        if isinstance(entry, GGUFEntry):
            return torch.cat([values for _, values in self._pieces(name)])
        try:
            file = self._files[entry.path]
            if axis is None:
                return file.get_tensor(entry.stored_name)
            size = entry.shape[axis] // self._part.count
            begin = self._part.index * size
            return file.get_slice(entry.stored_name)[(slice(None),) * axis + (slice(begin, begin + size),)]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{entry.path}: cannot read tensor {entry.stored_name}: {error}") from None


@contextmanager
def open_reader(
    entries: dict[str, TensorEntry], device: torch.device, dtype: torch.dtype, part: Part = WHOLE
) -> Iterator[WeightReader]:
    """A reader of tensors whose names and shapes were found right, and can be cut. ModelError."""
    with ExitStack() as stack:
        files = {}
        for path in sorted({each.path for each in entries.values() if not isinstance(each, GGUFEntry)}):
            try:
                files[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read ({error}); download it again") from None
        yield WeightReader(entries, files, device, dtype, part)

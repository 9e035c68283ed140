"""Weights from safetensors onto a device: cast, and joined where the networks want one matrix.

Names and shapes are checked before anything is allocated (mmengine.checkpoint), so what a folder can make
this process allocate is bounded by the size of its files. At most one stored tensor is held beside the model.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mmengine.checkpoint.tensors import TensorEntry
from mmengine.errors import ModelError


class WeightReader:
    """Reads tensors by canonical name onto `device` as `dtype`."""

    def __init__(
        self,
        entries: dict[str, TensorEntry],
        files: dict[Path, safe_open],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._entries, self._files, self._device, self._dtype = entries, files, device, dtype

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, *names: str) -> torch.Tensor:
        """One tensor, or several joined along their first dimension."""
        shapes = [self._entries[name].shape for name in names]
        out = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), device=self._device, dtype=self._dtype
        )
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            out[row : row + shape[0]].copy_(self._stored(name))
            row += shape[0]
        return out

    def same(self, first: str, second: str) -> bool:
        """Whether two stored tensors are equal, value for value."""
        if self._entries[first].shape != self._entries[second].shape:
            return False
        return torch.equal(self._stored(first), self._stored(second))

    def _stored(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        try:
            return self._files[entry.path].get_tensor(entry.stored_name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{entry.path}: cannot read tensor {entry.stored_name}: {error}") from None


@contextmanager
def open_reader(
    entries: dict[str, TensorEntry], device: torch.device, dtype: torch.dtype
) -> Iterator[WeightReader]:
    """A reader of tensors whose names and shapes were found right. ModelError."""
    with ExitStack() as stack:
        files = {}
        for path in sorted({entry.path for entry in entries.values()}):
            try:
                files[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read ({error}); download it again") from None
        yield WeightReader(entries, files, device, dtype)

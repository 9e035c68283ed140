"""Joins a patch embedding's kernel from two tensors. GGUF files store a tensor for each of a patch's two
frames.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmengine.checkpoint.gguf.container import Container
from mmengine.checkpoint.gguf.tensors import GGUFEntry, tensor_entry
from mmengine.checkpoint.tensors import TensorEntry


@dataclass(frozen=True, slots=True)
class FramesEntry(GGUFEntry):
    """A kernel [out, channels, frames, height, width] that the file stores as a tensor for each frame."""

    frames: tuple[GGUFEntry, ...] = ()

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        for parts in zip(*(frame.pieces(begin, end) for frame in self.frames), strict=True):
            yield parts[0][0], np.stack([rows for _, rows in parts], axis=2)

    @property
    def companions(self) -> tuple[TensorEntry, ...]:
        return self.frames[1:]


def patch_entry(container: Container, name: str) -> GGUFEntry:
    """Return the entry for the patch embedding `name`. Raises ModelError if the frames differ in shape."""
    first, second = container.tensors[name], container.tensors.get(f"{name}.1")
    if second is None:
        return tensor_entry(first)
    if second.shape != first.shape or len(first.shape) != 4:
        container.fields.fail(
            f"tensors {name} and {name}.1 have shapes {list(first.shape)} and {list(second.shape)}; equal "
            "shapes with four dimensions are required"
        )
    frames = tensor_entry(first), tensor_entry(second)
    out, channels, height, width = first.shape
    return FramesEntry(
        path=first.path,
        stored_name=first.name,
        dtype=first.type.name,
        shape=(out, channels, 2, height, width),
        start=first.start,
        num_bytes=first.num_bytes,
        type=first.type,
        frames=frames,
    )

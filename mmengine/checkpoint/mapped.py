"""A file of weights as memory: who reads a tensor needs no copy of it, and the system keeps what fits.

A file that somebody cuts short while it is mapped ends the process with SIGBUS, as it does under safetensors'
own reader; headers and sizes are checked before (mmengine.checkpoint.tensors).
"""

import mmap
from pathlib import Path

from mmengine.errors import ModelError


class MappedFile:
    """`memory`: the whole file. What is written to it stays in this process."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        try:
            with path.open("rb") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read ({error}); download it again") from None
        if hasattr(mmap, "MADV_SEQUENTIAL"):  # Linux, macOS
            self.memory.madvise(mmap.MADV_SEQUENTIAL)

    def let_go(self, start: int, num_bytes: int) -> None:
        """These bytes are not looked at again soon: whole pages of them leave this process, which the system
        still keeps as long as it has room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (start + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole > 0:
                self.memory.madvise(mmap.MADV_DONTNEED, first, whole)

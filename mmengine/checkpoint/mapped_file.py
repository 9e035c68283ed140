"""Maps a weights file into memory, so that readers use the page cache directly, without a copy.

If the file is truncated while it is mapped, the process ends with SIGBUS, as with safetensors' own reader.
mmengine.checkpoint.tensors refuses files that are truncated before they are mapped.
"""

import mmap
from pathlib import Path

from mmengine.checkpoint.files import open_regular
from mmengine.errors import ModelError


class MappedFile:
    """A mapped file. `memory`: the whole file. Writes to `memory` do not change the file."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises ModelError."""
        try:
            with open_regular(path) as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # An empty file cannot be mapped.
            raise ModelError(f"{path} cannot be read ({error}); download it again") from None
        if hasattr(mmap, "MADV_SEQUENTIAL"):  # Linux, macOS.
            self.memory.madvise(mmap.MADV_SEQUENTIAL)

    def release(self, start: int, num_bytes: int) -> None:
        """Drop the process's pages that lie wholly within a byte range that is not needed again soon.

        The data stays in the page cache as long as memory suffices.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (start + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole > 0:
                self.memory.madvise(mmap.MADV_DONTNEED, first, whole)

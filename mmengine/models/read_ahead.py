"""Prefetches weight files from the disk while the tokenizer is loaded and weights are packed."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST_BYTES = 64 * 2**20  # Smaller files are fast to read without prefetching.
_STEP = 512 * 2**10  # For a larger range, Linux prefetches only as much as the disk transfers at once.


@contextmanager
def reading_ahead(paths: Sequence[Path], room: int) -> Iterator[None]:
    """Prefetch the files on a thread, one after the other, while the context lasts. Files that are already in
    the page cache cost almost nothing.

    `room`: free memory in bytes. If the files together exceed half that size, nothing is prefetched, because
    the packed weights would evict the pages again.
    """
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    if not LEAST_BYTES <= sum(sizes) <= room // 2 or not hasattr(os, "posix_fadvise"):  # Linux only.
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(target=_ask, args=(paths, stopped), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _ask(paths: Sequence[Path], stopped: threading.Event) -> None:
    with suppress(OSError):  # The code that reads the weights reports errors.
        for path in paths:
            with path.open("rb", buffering=0) as file:
                for start in range(0, os.fstat(file.fileno()).st_size, _STEP):
                    if stopped.is_set():
                        return
                    os.posix_fadvise(file.fileno(), start, _STEP, os.POSIX_FADV_WILLNEED)

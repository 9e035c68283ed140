"""Prefetches weight files from the disk while the tokenizer is loaded and weights are packed."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST_BYTES = 64 * 2**20  # Files that are smaller in total load fast enough without prefetching.
_STEP = 512 * 2**10  # Bytes per call: Linux prefetches only the beginning of a larger range.


@contextmanager
def reading_ahead(paths: Sequence[Path], room: int) -> Iterator[None]:
    """Prefetch the files on a thread, one after another, while the context lasts. Files that are already in
    the page cache take almost no time.

    `room`: free memory in bytes. If the files exceed half this size, nothing is prefetched, because packed
    weights would evict the prefetched pages.
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
    with suppress(OSError):  # Errors are reported by the code that reads the weights.
        for path in paths:
            with path.open("rb", buffering=0) as file:
                for start in range(0, os.fstat(file.fileno()).st_size, _STEP):
                    if stopped.is_set():
                        return
                    os.posix_fadvise(file.fileno(), start, _STEP, os.POSIX_FADV_WILLNEED)

"""Weights on their way from the disk before they are wanted: beside a tokenizer that is read, and beside
weights that are packed."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST_BYTES = 64 * 2**20  # of files below it nobody waits for the disk
_STEP = 512 * 2**10  # Linux reads no more for one call than a disk takes at once


@contextmanager
def reading_ahead(paths: Sequence[Path], room: int) -> Iterator[None]:
    """While it lasts, a thread asks the system for the files, in their order; what it holds already costs
    next to nothing. `room`: bytes of memory that are free: files of more than half of it are left alone,
    because what is read early would be dropped again for what is made of it."""
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    if not LEAST_BYTES <= sum(sizes) <= room // 2 or not hasattr(os, "posix_fadvise"):  # Linux
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
    with suppress(OSError):  # who wants the weights says what is wrong with them
        for path in paths:
            with path.open("rb", buffering=0) as file:
                for start in range(0, os.fstat(file.fileno()).st_size, _STEP):
                    if stopped.is_set():
                        return
                    os.posix_fadvise(file.fileno(), start, _STEP, os.POSIX_FADV_WILLNEED)

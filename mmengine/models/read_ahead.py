"""Weights on their way from the disk before they are wanted: beside a tokenizer that is read, and beside
weights that are packed."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST_BYTES = 64 * 2**20  # of files below it nobody waits for the disk
_CHUNK = 2 * 2**20


@contextmanager
def reading_ahead(paths: Sequence[Path], room: int) -> Iterator[None]:
    """While it lasts, a thread reads the files once, in their order; what the system holds already is passed
    over. `room`: bytes of memory that are free: files of more than half of it are left alone, because what
    is read early would be dropped again for what is made of it."""
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    if not LEAST_BYTES <= sum(sizes) <= room // 2 or not hasattr(os, "RWF_NOWAIT"):  # Linux has it
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(target=_read, args=(paths, stopped), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _read(paths: Sequence[Path], stopped: threading.Event) -> None:
    buffer = bytearray(_CHUNK)
    with suppress(OSError):  # who wants the weights says what is wrong with them
        for path in paths:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                for start in range(0, size, _CHUNK):
                    if stopped.is_set():
                        return
                    if not _is_held(file.fileno(), start, min(size, start + _CHUNK)):
                        os.preadv(file.fileno(), [buffer], start)


def _is_held(file: int, start: int, end: int) -> bool:
    """Whether the first and the last byte come without the disk."""
    try:
        return all(os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT) for place in (start, end - 1))
    except OSError:  # it would wait, or the file system cannot tell
        return False

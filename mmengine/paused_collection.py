"""Pauses Python's cyclic garbage collector."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_pauses = 0  # Number of `paused_collection` blocks that are active now.
_was_enabled = False


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the collector in all threads. The collector resumes when no thread is inside a
    `paused_collection` block. Code that creates about 100,000 long-lived objects should run in such a block.
    Otherwise the collector would traverse all objects repeatedly, and stop all threads for 0.1 s each time.
    """
    global _num_pauses, _was_enabled
    with _lock:
        if not _num_pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _lock:
            _num_pauses -= 1
            if not _num_pauses and _was_enabled:
                gc.enable()

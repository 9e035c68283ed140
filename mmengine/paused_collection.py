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
    """Pause the collector inside the block.

    All threads share the collector. The collector resumes when no thread is inside such a block.

    Code that creates a hundred thousand objects that stay alive should run in such a block. The collector
    would traverse these and all other objects again and again. Each traversal takes 0.1 s, during which no
    other thread runs, not even the event loop's.
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

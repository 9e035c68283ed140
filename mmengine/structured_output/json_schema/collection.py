"""Python's cyclic garbage collector, paused while a schema is worked out.

A large schema is a hundred thousand objects that live until it is done. The collector would go through all of
them, and through all else that the process holds, again and again, each time a tenth of a second in which no
other thread runs, that of an event loop among them.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changing = threading.Lock()
_users = 0  # how many want it paused now
_was_on = False


@contextmanager
def paused_collection() -> Iterator[None]:
    """For all threads, as there is but one collector; it is as it was once the last user is done."""
    global _users, _was_on
    with _changing:
        if not _users:
            _was_on = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _changing:
            _users -= 1
            if not _users and _was_on:
                gc.enable()

"""Runs functions on threads with a large stack.

The grammar engine recurses as deeply as rules, items and references are nested, and a stack overflow would
end the process.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

# Twice the size that the deepest allowed nesting needs; spec.py and normalization limit the nesting. Only the
# used part takes memory.
STACK_BYTES = 256 * 2**20
_T = TypeVar("_T")


def start_deep(thread: threading.Thread) -> None:
    """Start the thread with a stack of STACK_BYTES.

    The stack size is a global setting for new threads, so it is restored afterwards.
    """
    before = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)


def call_deep(function: Callable[[], _T]) -> _T:
    """Return the result of `function`, which runs on a thread with a large stack. Its errors are raised."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="mmengine-deep", daemon=True)
    start_deep(thread)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]

"""Runs functions on threads with a large stack. The grammar engine recurses into nested rules, items and
references. A stack overflow would end the process.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

# Twice the stack that the deepest nesting needs. The limits on nesting are in spec.py and in normalization.
# Unused stack takes no memory.
STACK_BYTES = 256 * 2**20
_T = TypeVar("_T")


def start_deep(thread: threading.Thread) -> None:
    """Start the thread with a stack of STACK_BYTES. Python's stack size for new threads is a global setting,
    so the old value is restored.
    """
    before = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)


def call_deep(function: Callable[[], _T]) -> _T:
    """Run `function` on a thread with a large stack, and return its result or raise its error."""
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

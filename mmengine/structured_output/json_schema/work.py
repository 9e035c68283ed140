"""Limits the work and the time for normalizing a schema."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_STEPS = 6_000_000  # Maximum number of steps for a schema: a few seconds of work.
MAX_SECONDS = 12.0  # Maximum time in seconds, for slow or busy machines.


class WorkExceeded(Exception):
    """Raised if a normalization exceeds its limits. `normalize_schema` then refuses the schema. This class
    does not inherit from SchemaRefused, because comparisons catch SchemaRefused and continue.
    """

    # The innermost keyword that exceeded the limits, and its JSON pointer.
    keyword = pointer = ""


class _Work:
    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check
        self.steps_left = MAX_STEPS
        self.ends_at = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self.check()
        self.steps_left -= steps
        if self.steps_left < 0 or time.monotonic() > self.ends_at:
            raise WorkExceeded


_work: ContextVar[_Work | None] = ContextVar("mmengine_schema_work", default=None)


@contextmanager
def limited_work(check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Limit this thread's work until the `with` block ends. Nested blocks share the outermost block's limits.

    `check` is called repeatedly, and may raise an error to cancel the work.
    """
    if _work.get() is not None:
        yield
        return
    token = _work.set(_Work(check))
    try:
        yield
    finally:
        _work.reset(token)


@contextmanager
def comparisons_of(keyword: str, pointer: str) -> Iterator[None]:
    """If the `with` block raises WorkExceeded, add the keyword and the pointer to the error. Keep a keyword
    that an inner block has added.
    """
    try:
        yield
    except WorkExceeded as error:
        if not error.keyword:
            error.keyword, error.pointer = keyword, pointer
        raise


def spend_work(steps: int) -> None:
    """Count `steps`, each a visited state or a comparison. Raises WorkExceeded beyond the limits."""
    work = _work.get()
    if work is not None:
        work.spend(steps)

"""The work and time that a schema's normalization may take, all its comparisons together."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_STEPS = 6_000_000  # Maximum number of steps of a schema's comparisons: a few seconds.
MAX_SECONDS = 12.0  # Maximum time, on a machine that is slower or busy.


class WorkExceeded(Exception):
    """Raised inside a normalization that exceeds its limits; `normalize_schema` refuses the schema.

    It is no SchemaRefused, so that a comparison that treats a refused part as unknown does not go on.
    """

    keyword = pointer = ""  # The innermost keyword whose comparisons exceeded the limits, and its pointer.


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
    """Limit the work on this thread inside the block. A block inside another one shares its limits.

    `check` is called again and again during the work; it raises if the work is no longer needed.
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
    """Record the keyword in a WorkExceeded from this block, unless an inner block recorded its own."""
    try:
        yield
    except WorkExceeded as error:
        if not error.keyword:
            error.keyword, error.pointer = keyword, pointer
        raise


def spend_work(steps: int) -> None:
    """Count `steps`, a visited state or a compared constraint each. Raises WorkExceeded beyond the limits."""
    work = _work.get()
    if work is not None:
        work.spend(steps)

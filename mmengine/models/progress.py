"""Who wants to know how far the reading of weights is. No torch here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int], None]  # bytes that are read, of how many
_listener: ContextVar[Progress | None] = ContextVar("weights", default=None)


@contextmanager
def weights_told(progress: Progress) -> Iterator[None]:
    """`progress` hears of each tensor that this thread reads meanwhile."""
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(num_bytes: int, whole: int) -> None:
    if (listener := _listener.get()) is not None:
        listener(num_bytes, whole)

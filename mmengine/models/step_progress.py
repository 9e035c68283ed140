"""Who wants to know that a step gets on: a step that tells nothing for long hangs. No torch here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[], None] | None] = ContextVar("step", default=None)


@contextmanager
def steps_told(listener: Callable[[], None]) -> Iterator[None]:
    """`listener` is called now and then, on this thread, while it computes what stands in here."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell() -> None:
    """Something of the step is done: a layer, or a part of one."""
    if (listener := _listener.get()) is not None:
        listener()

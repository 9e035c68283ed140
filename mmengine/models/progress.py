"""Reports progress from a thread that reads weights or computes a step. Does not import torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int], None]  # Arguments: bytes read so far, and total bytes.
_weights: ContextVar[Progress | None] = ContextVar("weights", default=None)
_step: ContextVar[Callable[[], None] | None] = ContextVar("step", default=None)


@contextmanager
def weights_reported_to(progress: Progress) -> Iterator[None]:
    """Within the context, call `progress` after each read from a tensor in this thread."""
    token = _weights.set(progress)
    try:
        yield
    finally:
        _weights.reset(token)


def report_weights(num_bytes: int, total: int) -> None:
    if (listener := _weights.get()) is not None:
        listener(num_bytes, total)


@contextmanager
def steps_reported_to(listener: Callable[[], None]) -> Iterator[None]:
    """Within the context, call `listener` each time this thread reports progress in a step. A long silence
    thus reveals a hung step.
    """
    token = _step.set(listener)
    try:
        yield
    finally:
        _step.reset(token)


def report_step() -> None:
    """Report that the current step has finished a layer, or a part of a layer."""
    if (listener := _step.get()) is not None:
        listener()

"""The interface through which the engine's loop writes its log, and a base class for wrappers around a
log.
"""

from typing import Protocol

from mmengine.events.vocabulary import Event


class Sink(Protocol):
    """A log to which the engine's loop appends events."""

    @property
    def next_sequence(self) -> int:
        """The sequence number for the record that is appended next."""

    @property
    def num_bytes(self) -> int:
        """How many bytes were written so far. The number is 0 for a sink that writes no file."""

    @property
    def stalled(self) -> str:
        """The reason to refuse new requests, or ""."""

    def append(self, event: Event, step: int, mono_ns: int) -> None: ...

    def commit(self) -> bool:
        """Write all appended events, so that they survive if the process is killed. Returns False on
        failure.
        """

    def sync(self) -> None:
        """Sync all committed events, so that they also survive a power cut. Any thread may call this
        method.
        """

    def tidy(self) -> None:
        """Do postponed work, such as packing segments. Any thread may call this method, but only one thread
        at a time.
        """

    def close(self) -> None:
        """Close the sink. Raises LogError if appended records cannot be written."""


class SinkWrapper:
    """Wraps the sink `inner` and forwards every method that a subclass does not override."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner

    @property
    def next_sequence(self) -> int:
        return self.inner.next_sequence

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes

    @property
    def stalled(self) -> str:
        return self.inner.stalled

    def append(self, event: Event, step: int, mono_ns: int) -> None:
        self.inner.append(event, step, mono_ns)

    def commit(self) -> bool:
        return self.inner.commit()

    def sync(self) -> None:
        self.inner.sync()

    def tidy(self) -> None:
        self.inner.tidy()

    def close(self) -> None:
        self.inner.close()

"""The interface between the engine's loop and its log."""

from typing import Protocol

from mmengine.events.vocabulary import Event


class Sink(Protocol):
    @property
    def next_sequence(self) -> int:
        """The sequence number that the next appended record gets."""

    @property
    def num_bytes(self) -> int:
        """How many bytes were written; 0 for a sink that writes no file."""

    @property
    def stalled(self) -> str:
        """Why new requests should be refused, or ""."""

    def append(self, event: Event, step: int, mono_ns: int) -> None: ...

    def commit(self) -> bool:
        """Write all appended events, so that they survive a killed process. Returns False if that failed."""

    def sync(self) -> None:
        """Sync all committed events, so that they survive a power cut too. Another thread may call it."""

    def tidy(self) -> None:
        """Do postponed work, such as packing. Any thread may call this method, but one at a time."""

    def close(self) -> None:
        """Close the sink. Raises LogError if appended records cannot be written any more."""


class SinkWrapper:
    """Wraps `inner` and forwards every method that a subclass does not override."""

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

"""Where the loop puts events: the port that a log is behind."""

from typing import Protocol

from mmengine.events.vocabulary import Event


class Sink(Protocol):
    @property
    def next_sequence(self) -> int:
        """Of the record that is appended next."""

    @property
    def num_bytes(self) -> int:
        """Bytes that were written here; 0 where nothing is."""

    @property
    def stalled(self) -> str:
        """Why no new requests should be taken, or empty."""

    def append(self, event: Event, step: int, mono_ns: int) -> None: ...

    def commit(self) -> bool:
        """Make everything appended durable against a killed process. False: it could not be."""

    def sync(self) -> None:
        """Make what was committed durable against a power cut, too. Another thread may call it."""

    def tidy(self) -> None:
        """Do what can wait. Another thread may call it, one at a time."""

    def close(self) -> None:
        """Raises LogError when records that were appended cannot be written any more."""


class SinkWrapper:
    """Stands before `inner`; what a subclass does not change goes on to that."""

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

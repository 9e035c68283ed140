"""A sink whose records others read too."""

from typing import Any

from mmengine.events.codec import encode
from mmengine.events.log import Sink
from mmengine.events.vocabulary import NUMBERS, Event


class Tee:
    """Stands before `inner` and keeps what that committed as frames, until `take`. What else `inner` can do
    is asked of it through this."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner
        self._sequence = getattr(inner, "next_sequence", 0)
        self._pending: list[tuple[int, int, int, Event]] = []
        self._frames: list[bytes] = []

    def append(self, event: Event, step: int, mono_ns: int) -> None:
        self.inner.append(event, step, mono_ns)
        self._pending.append((NUMBERS[type(event)], step, mono_ns, event))

    def commit(self) -> bool:
        if not self.inner.commit():
            return False
        if self._pending:
            self._frames += encode(self._pending, self._sequence)
            self._sequence += len(self._pending)
            self._pending.clear()
        return True

    def take(self) -> bytes:
        """The frames committed since the last call."""
        frames, self._frames = b"".join(self._frames), []
        return frames

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

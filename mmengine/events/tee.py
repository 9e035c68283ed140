"""A log writer that also returns its committed records as bytes, so that they can be sent to another
process.
"""

from mmengine.events.codec import encode
from mmengine.events.sink import Sink, SinkWrapper
from mmengine.events.vocabulary import NUMBERS, Event


class Tee(SinkWrapper):
    """Forwards all calls to `inner`, and keeps committed events as encoded frames until the next `take`."""

    def __init__(self, inner: Sink) -> None:
        super().__init__(inner)
        self._sequence = inner.next_sequence
        self._pending: list[tuple[int, int, int, Event]] = []
        self._frames: list[bytes] = []

    def append(self, event: Event, step: int, mono_ns: int) -> None:
        super().append(event, step, mono_ns)
        self._pending.append((NUMBERS[type(event)], step, mono_ns, event))

    def commit(self) -> bool:
        if not super().commit():
            return False
        if self._pending:
            self._frames += encode(self._pending, self._sequence)
            self._sequence += len(self._pending)
            self._pending.clear()
        return True

    def take(self) -> bytes:
        """Return the frames that were committed since the last call."""
        frames, self._frames = b"".join(self._frames), []
        return frames

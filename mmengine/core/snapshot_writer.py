"""Saves an engine's state as its log grows, so that a continuing process folds only the log's end."""

from contextlib import suppress
from functools import partial

from mmengine.core.snapshot import snapshot
from mmengine.core.snapshot.saving import body_of
from mmengine.core.state.state import State
from mmengine.core.undelivered_answers import UndeliveredAnswers
from mmengine.events import vocabulary as ev
from mmengine.events.sink import Sink
from mmengine.events.snapshots import SnapshotFolder


class SnapshotWriter:
    """Takes snapshots of `state`, whose log `started` began, and passes them to `folder`.

    A snapshot contains the undelivered answers, if `undelivered` knows them. `sink` writes the log.
    """

    def __init__(
        self,
        folder: SnapshotFolder,
        state: State,
        started: ev.Started,
        sink: Sink,
        undelivered: UndeliveredAnswers | None,
    ):
        self._folder, self._state, self._started = folder, state, started
        self.sink, self.undelivered = sink, undelivered

    def save_if_due(self) -> None:
        """Take a snapshot if the log has grown enough. The log must hold all of the state's events."""
        sink, folder = self.sink, self._folder
        # On a full disk the remaining space is for running requests.
        if not folder.is_due(sink.num_bytes, sink.next_sequence) or sink.stalled:
            return
        sequence = sink.next_sequence - 1
        body = body_of(self._state, self._started, sequence)
        undelivered = None if self.undelivered is None else self.undelivered.saved()
        folder.put(sequence, partial(snapshot.packed, body, undelivered), sink.num_bytes)
        if not folder.in_background:
            self.flush()

    def flush(self) -> None:
        """Write the waiting snapshot. One thread at a time may call this method."""
        if self._folder.waits:
            with suppress(OSError):  # the next sync reports the error
                self.sink.sync()  # after a power cut no snapshot may be ahead of the log
            self._folder.flush()

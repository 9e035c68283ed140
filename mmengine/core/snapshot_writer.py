"""Saves an engine's state while its log grows. A process that continues the log then reads only the records
after the last snapshot.
"""

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
    """Takes snapshots of `state` and passes them to `folder`. `started`: the log's first event. `sink`: the
    log. `undelivered`: the undelivered answers, which are added to the snapshots; None if they are unknown.
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
        """Take a snapshot if the log has grown enough since the last snapshot. All events that were applied
        to the state must be committed to the log."""
        sink, folder = self.sink, self._folder
        # On a full disk, no snapshot is taken: the remaining space is for the events of running requests.
        if not folder.is_due(sink.num_bytes, sink.next_sequence) or sink.stalled:
            return
        sequence = sink.next_sequence - 1
        body = body_of(self._state, self._started, sequence)
        undelivered = None if self.undelivered is None else self.undelivered.saved()
        folder.put(sequence, partial(snapshot.packed, body, undelivered), sink.num_bytes)
        if not folder.in_background:
            self.flush()

    def flush(self) -> None:
        """Write the waiting snapshot to disk. One thread at a time may call this method."""
        if self._folder.waits:
            with suppress(OSError):  # the next sync reports the error
                self.sink.sync()  # a power cut must not leave a snapshot that is newer than the log
            self._folder.flush()

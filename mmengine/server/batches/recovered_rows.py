"""Recovers batch requests from the log after a restart."""

import re
from typing import NamedTuple

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.chat.submission import log_request_id
from mmengine.server.storage.batches import Batches

# The format of a batch request's id in the log.
_ROW = re.compile(r"(?:(?P<owner>[^:]*):)?(?P<batch>batch_[0-9a-f]{24})-\d+(?:-\d+)?")


class RecoveredRow(NamedTuple):
    stream: Stream
    envelope: bytes


class RecoveredRows:
    """The recovered requests of batches that have not ended. Each request has a stream.

    Recovered requests of ended batches are cancelled. Create this object before the call registry.
    Otherwise the registry would treat batch requests as calls from clients.
    """

    def __init__(self, engine: ServedEngine, batches: Batches):
        self._rows: dict[str, RecoveredRow] = {}  # Maps an id in the log to the request.
        for left in engine.recovered_requests():
            found = _ROW.fullmatch(left.request_id)
            batch = batches.get(found["batch"], found["owner"] or "") if found is not None else None
            if batch is None:
                continue
            if batch.is_live:
                stream = engine.attach(left.request_id, hold=True)
                self._rows[left.request_id] = RecoveredRow(stream, left.envelope)
            else:
                engine.give_up(left.request_id)

    def pop(self, names: list[str]) -> list[RecoveredRow]:
        """Remove and return the requests with these ids. Unknown ids are ignored. The caller must end the
        streams.
        """
        return [self._rows.pop(name) for name in names if name in self._rows]

    def drop(self, owner: str, batch_id: str) -> None:
        """Cancel an ended batch's remaining requests."""
        begin = log_request_id(owner, f"{batch_id}-")
        for row in self.pop([name for name in self._rows if name.startswith(begin)]):
            discard_stream(row.stream)

    def leave(self) -> None:
        """Detach all streams when the process ends. The requests stay in the log."""
        for row in self.pop(list(self._rows)):
            row.stream.leave()


def discard_stream(stream: Stream) -> None:
    """Cancel a stream whose output is not needed."""
    stream.cancel()
    stream.delivered()

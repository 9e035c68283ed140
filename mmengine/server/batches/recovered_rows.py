"""Requests of batches that the process before left in the log."""

import re
from typing import NamedTuple

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.chat.submission import in_log
from mmengine.server.storage.batches import Batches

_ROW = re.compile(r"(?:(?P<owner>[^:]*):)?(?P<batch>batch_[0-9a-f]{24})-\d+(?:-\d+)?")  # ids in the log


class RowLeft(NamedTuple):
    stream: Stream
    envelope: bytes


class RowsLeft:
    """Those of batches that are live are taken up, those of batches that have ended are given up. Make it
    before anybody else looks at what was left: they are no calls."""

    def __init__(self, engine: ServedEngine, batches: Batches):
        self._rows: dict[str, RowLeft] = {}  # by their ids in the log
        for left in engine.recovered_requests():
            found = _ROW.fullmatch(left.request_id)
            batch = batches.get(found["batch"], found["owner"] or "") if found is not None else None
            if batch is None:
                continue
            if batch.is_live:
                stream = engine.attach(left.request_id, hold=True)
                self._rows[left.request_id] = RowLeft(stream, left.envelope)
            else:
                engine.give_up(left.request_id)

    def pop(self, names: list[str]) -> list[RowLeft]:
        """Those of these ids that there are, which are the caller's from now on."""
        return [self._rows.pop(name) for name in names if name in self._rows]

    def drop(self, owner: str, batch_id: str) -> None:
        """The batch has ended: nobody needs what is still there of it."""
        begin = in_log(owner, f"{batch_id}-")
        for row in self.pop([name for name in self._rows if name.startswith(begin)]):
            let_go(row.stream)

    def leave(self) -> None:
        """The process ends: they stay in the log."""
        for row in self.pop(list(self._rows)):
            row.stream.leave()


def let_go(stream: Stream) -> None:
    """Nobody needs its answer."""
    stream.cancel()
    stream.delivered()

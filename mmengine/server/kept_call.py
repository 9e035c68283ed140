"""A call that goes on when its client leaves, and all who read its answer."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from mmengine.serve.record import News, Reader, Record
from mmengine.serve.stream import Stream
from mmengine.server.asked import Asked
from mmengine.server.callers import Key
from mmengine.server.responses.kept import Answered

_OUTPUTS_OF_A_CALL = 16  # as many as a call takes beside them
_BYTES_OF_AN_OUTPUT = 256  # as many of a call's envelope take its room
RESPONSE = "response"  # the kind of key that a stored response has
_IS_OVER, _IS_GOOD = attrgetter("is_over"), attrgetter("is_good")  # generators cost more than these


class Keeper(Protocol):
    """`attended`: a client reads a call. `unattended`: the last one left. `over`: all of its answer has
    come."""

    def attended(self, call: "Call") -> None: ...

    def unattended(self, call: "Call") -> None: ...

    def over(self, call: "Call") -> None: ...


class Call:
    """One that goes on when its client leaves. `keys`: by which it is known when it comes again. `is_stored`:
    its answer goes into the store when it is whole."""

    def __init__(
        self, asked: Asked, streams: Sequence[Stream], keeper: "Keeper", keys: list[Key], is_stored: bool
    ):
        self.asked, self.keys, self._keeper, self.is_stored = asked, keys, keeper, is_stored
        self.streams = streams
        self.records = list(map(Record, streams))
        self.name: Key = asked.envelope.owner, RESPONSE, asked.request_id
        self.is_answered = False  # all of it has come, its keeper was told so, and it is good
        self._num_readers = 0
        self.timer: asyncio.TimerHandle | None = None  # None: it never waited for a client
        for record in self.records:
            record.begin(self._ended)

    @property
    def stays(self) -> bool:
        """Whether it is finished though nobody asks for it."""
        responses = self.asked.envelope.responses
        return self.is_stored and responses is not None and responses.background

    @property
    def is_live(self) -> bool:
        """Whether a client listens."""
        return bool(self._num_readers)

    @property
    def is_over(self) -> bool:
        return all(map(_IS_OVER, self.records))

    @property
    def size(self) -> int:
        """What it takes of memory, in outputs."""
        of_a_token = 1 if (count := self.streams[0].sampling.logprobs) is None else 2 + count
        envelope = sum(len(stream.envelope) for stream in self.streams)
        outputs = sum(record.num_tokens for record in self.records) * of_a_token
        return _OUTPUTS_OF_A_CALL + outputs + envelope // _BYTES_OF_AN_OUTPUT

    @property
    def is_accepted(self) -> bool:
        return all(stream.is_accepted for stream in self.streams)

    @property
    def is_refused(self) -> bool:
        """Whether the log never had it."""
        return any(stream.is_refused for stream in self.streams)

    @property
    def is_good(self) -> bool:
        """Whether it was accepted, and did not fail."""
        return all(map(_IS_GOOD, self.records))

    def readers(self) -> list[News]:
        if self.timer is not None:
            self._keeper.attended(self)
        self._num_readers += len(self.records)
        return [Reader(record, self._left) for record in self.records]

    def _left(self) -> None:
        self._num_readers -= 1
        if not self._num_readers:
            self._keeper.unattended(self)

    def _ended(self) -> None:
        if self.is_over:
            self.is_answered = self.is_good
            self._keeper.over(self)

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    def answered(self) -> Answered:
        """Of a response that is whole. On any thread."""
        asked = self.asked
        return Answered(asked.envelope, asked.request_id, self.streams[0].envelope, self.records[0].whole())

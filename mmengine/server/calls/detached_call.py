"""A call that goes on when its client leaves, and all who read its answer."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from mmengine.serve.stream.answer_record import AnswerRecord, AnswerSource, DirectReader, RecordReader
from mmengine.serve.stream.request_stream import HeldAnswer, Stream
from mmengine.server.calls.call_identity import Key
from mmengine.server.calls.stored_responses import Answered
from mmengine.server.chat.parsed_request import Asked

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
    its answer goes into the store when it is whole. It begins with its first `readers`, or by `go_on`."""

    def __init__(
        self, asked: Asked, streams: Sequence[Stream], keeper: "Keeper", keys: list[Key], is_stored: bool
    ):
        self.envelope, self.request_id, self._keeper = asked.envelope, asked.request_id, keeper
        self.keys, self.is_stored = keys, is_stored
        self._streams = streams
        self._records = [AnswerRecord(stream, self._ended) for stream in streams]
        self.name: Key = asked.envelope.owner, RESPONSE, asked.request_id
        self.is_answered = False  # all of it has come, its keeper was told so, and it is good
        self._answered: Answered | None = None  # what is left of it in memory while it waits for the store
        self._held: list[HeldAnswer] = []  # where its streams are forgotten
        self._num_readers = 0
        self._has_begun = False
        self.timer: asyncio.TimerHandle | None = None  # None: it never waited for a client

    @property
    def stays(self) -> bool:
        """Whether it is finished though nobody asks for it."""
        responses = self.envelope.responses
        return self.is_stored and responses is not None and responses.background

    @property
    def is_live(self) -> bool:
        """Whether a client listens."""
        return bool(self._num_readers)

    @property
    def is_over(self) -> bool:
        records = self._records
        return records[0].is_over if len(records) == 1 else all(map(_IS_OVER, records))

    @property
    def size(self) -> int:
        """What it takes of memory, in outputs."""
        of_a_token = 1 if (count := self._streams[0].sampling.logprobs) is None else 2 + count
        envelope = sum(len(stream.envelope) for stream in self._streams)
        outputs = sum(record.num_tokens for record in self._records) * of_a_token
        return _OUTPUTS_OF_A_CALL + outputs + envelope // _BYTES_OF_AN_OUTPUT

    @property
    def is_accepted(self) -> bool:
        return all(stream.is_accepted for stream in self._streams)

    @property
    def is_refused(self) -> bool:
        """Whether the log never had it."""
        return any(stream.is_refused for stream in self._streams)

    @property
    def is_good(self) -> bool:
        """Whether it was accepted, and did not fail."""
        return all(map(_IS_GOOD, self._records))

    def record(self) -> AnswerRecord:
        """Of its first answer, with all that has come."""
        if not self._records and self._answered is not None:
            return AnswerRecord(self._answered.answer)
        self.go_on()
        return self._records[0]

    def go_on(self) -> None:
        """Whoever reads it, and if nobody does."""
        self._has_begun = True
        for record in self._records:
            record.follow()

    def readers(self) -> list[AnswerSource]:
        if self.timer is not None:
            self._keeper.attended(self)
        if not self._has_begun:
            self._has_begun = True
            self._num_readers = len(self._records)
            return [
                DirectReader(record, stream, self._left)
                for record, stream in zip(self._records, self._streams, strict=True)
            ]
        records = self._records or [self.record()]
        self.go_on()
        self._num_readers += len(records)
        return [RecordReader(record, self._left) for record in records]

    def _left(self) -> None:
        self._num_readers -= 1
        if not self._num_readers:
            self._keeper.unattended(self)

    def _ended(self) -> None:
        if self.is_over:
            self.is_answered = all(map(_IS_GOOD, self._records))
            self._keeper.over(self)

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def release(self) -> list[HeldAnswer]:
        """Nobody needs its answers any more: by which the log knows them."""
        return self._held or [stream.release() for stream in self._streams]

    def settle(self) -> None:
        """It is answered, and waits for the store, until when the log keeps it: of one that no key is known
        for nothing else stays."""
        asked = self.envelope, self.request_id, self._streams[0].envelope
        self._answered = Answered(*asked, self._records[0].whole())
        if not self.keys:
            self._held = [stream.held_answer for stream in self._streams]
            self._streams, self._records = (), []

    @property
    def answered(self) -> Answered:
        """Of a response that is settled."""
        assert self._answered is not None
        return self._answered

"""A call that continues when its client disconnects."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from mmengine.serve.stream.answer_record import AnswerRecord, AnswerSource, DirectReader, RecordReader
from mmengine.serve.stream.request_stream import HeldAnswer, Stream
from mmengine.server.calls.call_identity import Key
from mmengine.server.calls.stored_responses import FinishedResponse
from mmengine.server.chat.parsed_request import ParsedRequest

_OUTPUTS_OF_A_CALL = 16  # A call's fixed memory, counted as output tokens.
_BYTES_OF_AN_OUTPUT = 256  # This many envelope bytes count as an output token.
RESPONSE = "response"  # The kind in the key of a stored response.
_IS_OVER, _IS_GOOD = attrgetter("is_over"), attrgetter("is_good")  # `attrgetter` is faster than a generator.


class CallObserver(Protocol):
    """The registry's methods that a call invokes when the call's state changes.

    `attended`: a client started to read the call. `unattended`: the last client left. `over`: the answer is
    complete or has failed.
    """

    def attended(self, call: "DetachedCall") -> None: ...

    def unattended(self, call: "DetachedCall") -> None: ...

    def over(self, call: "DetachedCall") -> None: ...


class DetachedCall:
    """A call that continues when its client disconnects.

    `keys`: a later call with one of these keys gets the answer. `is_stored`: the finished answer is written
    to the store. The streams are not read before `readers` or `go_on` is called.
    """

    def __init__(
        self,
        parsed_request: ParsedRequest,
        streams: Sequence[Stream],
        keeper: "CallObserver",
        keys: list[Key],
        is_stored: bool,
    ):
        self.envelope, self.request_id, self._keeper = (
            parsed_request.envelope,
            parsed_request.request_id,
            keeper,
        )
        self.keys, self.is_stored = keys, is_stored
        self._streams = streams
        self._records = [AnswerRecord(stream, self._ended) for stream in streams]
        self.name: Key = parsed_request.envelope.owner, RESPONSE, parsed_request.request_id
        # Whether the answer is complete without an error and the registry has been notified.
        self.is_answered = False
        self._answered: FinishedResponse | None = None  # Set while the answer waits for the store.
        # The answers that the log must retain for this call. Set when the streams are dropped.
        self._held: list[HeldAnswer] = []
        self._num_readers = 0
        self._has_begun = False
        self.timer: asyncio.TimerHandle | None = None  # Waits for a client; None before the first wait.

    @property
    def stays(self) -> bool:
        """Whether the call runs to its end even without a client, as a background response does."""
        responses = self.envelope.responses
        return self.is_stored and responses is not None and responses.background

    @property
    def is_live(self) -> bool:
        """Whether a client reads the answer."""
        return bool(self._num_readers)

    @property
    def is_over(self) -> bool:
        records = self._records
        return records[0].is_over if len(records) == 1 else all(map(_IS_OVER, records))

    @property
    def size(self) -> int:
        """The call's memory, counted as output tokens."""
        of_a_token = 1 if (count := self._streams[0].sampling.logprobs) is None else 2 + count
        envelope = sum(len(stream.envelope) for stream in self._streams)
        outputs = sum(record.num_tokens for record in self._records) * of_a_token
        return _OUTPUTS_OF_A_CALL + outputs + envelope // _BYTES_OF_AN_OUTPUT

    @property
    def is_accepted(self) -> bool:
        return all(stream.is_accepted for stream in self._streams)

    @property
    def is_refused(self) -> bool:
        """Whether the engine refused any request of the call. The log does not contain refused requests."""
        return any(stream.is_refused for stream in self._streams)

    @property
    def is_good(self) -> bool:
        """Whether the call was accepted and did not fail."""
        return all(map(_IS_GOOD, self._records))

    def record(self) -> AnswerRecord:
        """Return the record of the first prompt's answer, with the output generated so far."""
        if not self._records and self._answered is not None:
            return AnswerRecord(self._answered.answer)
        self.go_on()
        return self._records[0]

    def go_on(self) -> None:
        """Read all streams to their end, with or without a client."""
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
        """Return the answers that the log retains. The caller passes them to the engine, which allows the log
        to delete them.
        """
        return self._held or [stream.release() for stream in self._streams]

    def settle(self) -> None:
        """Create the finished response, which waits for the store. If no later call can find this call by a
        key, drop the streams.
        """
        identity = self.envelope, self.request_id, self._streams[0].envelope
        self._answered = FinishedResponse(*identity, self._records[0].stored_answer())
        if not self.keys:
            self._held = [stream.held_answer for stream in self._streams]
            self._streams, self._records = (), []

    @property
    def answered(self) -> FinishedResponse:
        """The finished response. May only be read after `settle`."""
        assert self._answered is not None
        return self._answered

"""Renders answers in OpenAI's Responses format, as stream events or as a whole body.

Events are numbered from 0. An event depends only on the tokens, the request id and the envelope (the call
data in the log). A client can therefore continue a stream after any event, even after a server restart.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import ErrorCode
from mmengine.events.call_ids import call_id
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.text.choice_deltas import ArgumentError, Delta
from mmengine.serve.text.tool_call_parser import CallDelta
from mmengine.server.chat.chat_frames import FrameTails, Usage
from mmengine.server.chat.obfuscation import obfuscate
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.http.errors import ApiError
from mmengine.server.responses.custom_tools import custom_names
from mmengine.server.responses.output_items import Call, CustomCall, Message, OutputItem, Reasoning, event
from mmengine.server.responses.response import NULL, ResponseObject, usage_json

_INCOMPLETE = {"length": b'{"reason":"max_output_tokens"}', "repetition": b'{"reason":"repetition"}'}
_DELTA = re.compile(rb"event: [a-z_.]+\.delta\n")
_encode = msgspec.json.encode


class ResponsesFrames:
    """Renders responses as events or bodies.

    `texts`: the token texts for logprobs; None if the call asks for no logprobs. `after`: the number of the
    last event that the client has received. Events up to this number are omitted.
    """

    done = b""

    def __init__(self, request_id: str, envelope: Envelope, texts: TokenTexts | None, *, after: int = -1):
        self._request_id, self._texts, self._after = request_id, texts, after
        self.response, self._is_obfuscated = ResponseObject(request_id, envelope), envelope.is_obfuscated
        echo = envelope.responses
        self._custom_names = custom_names(echo.tools) if echo is not None else frozenset()
        self.is_background = envelope.responses is not None and envelope.responses.background
        self.tails = FrameTails("last")
        self._number = 0  # Number of the next event.
        self._closed: list[bytes] = []  # Complete output items.
        self._open: OutputItem | None = None
        self._end_reason = ""
        self._errors: tuple[ArgumentError, ...] = ()

    def _numbered(self, begun: bytes) -> bytes:
        """Return an event with its number, or b"" if the client has already received the event."""
        number = self._number
        self._number = number + 1
        if number <= self._after:
            return b""
        made = b'%b,"sequence_number":%d}\n\n' % (begun, number)
        return obfuscate(made) if self._is_obfuscated and _DELTA.match(made) else made

    def _all(self, events: Iterator[bytes]) -> bytes:
        return b"".join([self._numbered(each) for each in events])

    def _of_response(self, kind: bytes, response: bytes) -> bytes:
        return self._numbered(event(kind, b'"response":' + response))

    def first(self, index: int, scores: PromptLogprobs | None = None) -> bytes:
        running = self.response.of("in_progress")
        if not self.is_background:
            return self._of_response(b"created", running) + self._of_response(b"in_progress", running)
        queued = self.response.of("queued")
        return (
            self._of_response(b"created", queued)
            + self._of_response(b"queued", queued)
            + self._of_response(b"in_progress", running)
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        item = self._open
        if delta.content and isinstance(item, Message):  # Most deltas take this path.
            return self._numbered(item.grown(delta.content, delta.logprobs))
        return self._all(self._news(delta))

    def _news(self, delta: Delta) -> Iterator[bytes]:
        item = self._open
        if delta.reasoning:
            if not isinstance(item, Reasoning):
                yield from self._begin(item := Reasoning(self._request_id, self._place))
            yield item.grown(delta.reasoning, ())
        if delta.content:
            if not isinstance(item, Message):
                yield from self._begin(item := self._message())
            yield item.grown(delta.content, delta.logprobs)
        if delta.call is not None:
            yield from self._called(delta.call)

    def _called(self, call: CallDelta) -> Iterator[bytes]:
        if call.name:
            name = call_id(self._request_id, 0, call.number)
            kind = CustomCall if call.name in self._custom_names else Call
            yield from self._begin(kind(self._request_id, self._place, name, call.name))
        if isinstance(self._open, CustomCall):
            self._open.add_arguments(call.arguments)
        elif call.arguments and self._open is not None:
            yield self._open.grown(call.arguments, ())

    def _message(self) -> Message:
        return Message(self._request_id, self._place, self._texts)

    @property
    def _place(self) -> int:
        """The index of the next output item."""
        return len(self._closed) + (self._open is not None)

    def _begin(self, item: OutputItem) -> Iterator[bytes]:
        """Close the open item, and begin another item."""
        yield from self._close("completed")
        self._open = item
        yield from item.begun()

    def _close(self, status: str) -> Iterator[bytes]:
        if (item := self._open) is not None:
            self._open = None
            yield from item.ended(status)
            self._closed.append(item.whole)

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        self._end_reason, self._errors = finish_reason, rest.argument_errors
        events = self.delta(index, rest)
        if self._open is None and not self._closed:  # The answer is empty.
            events += self._all(self._begin(self._message()))
        if isinstance(self._open, Message):
            self._open.field_confidence, self._open.boxes = rest.field_confidence, rest.boxes
        return events + self._all(self._close(self._status))

    @property
    def _status(self) -> str:
        return "incomplete" if self._end_reason in _INCOMPLETE else "completed"

    def usage(self, usage: Usage) -> bytes:
        """Return the last event, which contains the whole response object."""
        return self._of_response(self._status.encode(), self._whole(usage))

    def _whole(self, usage: Usage) -> bytes:
        return self.response.of(
            self._status,
            output=b"[%b]" % b",".join(self._closed),
            usage=usage_json(usage),
            incomplete=_INCOMPLETE.get(self._end_reason, NULL),
            more=b',"argument_errors":' + _encode(self._errors) if self._errors else b"",
        )

    def whole(self, choices: Sequence[AccumulatedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        for delta in _deltas(choice):
            self.delta(0, delta)
        rest = Delta(
            argument_errors=choice.argument_errors,
            field_confidence=choice.field_confidence,
            boxes=choice.boxes,
        )
        self.finish(0, rest, choice.finish_reason, None)
        return self._whole(usage)

    def error(self, error: ApiError) -> bytes:
        """Return the event for an error.

        A failed or cancelled request ends with the event response.failed. OpenAI's clients know no event for
        cancellation, so only the response object's status says "cancelled". For an error with HTTP status 503
        and for an internal error, the stream ends with an error event instead. The error event repeats the
        previous event's number, so that a client can continue the stream from that number. The error event's
        field `error` makes OpenAI's clients raise an exception.
        """
        if error.code is ErrorCode.CANCELLED:
            return self._of_response(b"failed", self.response.of("cancelled"))
        if error.status != 503 and error.code is not ErrorCode.INTERNAL_ERROR:
            return self._of_response(b"failed", self.response.failed(error))
        properties = {
            "type": "error",
            "code": error.body.code,
            "message": error.body.message,
            "param": error.body.param,
            "error": error.body,
            "sequence_number": max(0, self._number - 1),
        }
        return b"event: error\ndata: " + _encode(properties) + b"\n\n"


def _deltas(choice: AccumulatedChoice) -> Iterator[Delta]:
    """Yield a delta for the reasoning, a delta for the text, and two deltas for each tool call."""
    if choice.reasoning:
        yield Delta(reasoning="".join(choice.reasoning))
    if choice.content:
        yield Delta("".join(choice.content), logprobs=tuple(choice.content_logprobs))
    for number, (name, arguments) in enumerate(zip(choice.names, choice.arguments, strict=True)):
        yield Delta(call=CallDelta(number, name=name))
        yield Delta(call=CallDelta(number, "".join(arguments)))

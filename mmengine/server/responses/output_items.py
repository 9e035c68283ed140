"""Renders a response's output items: their events, and the complete items. The methods return events without
the event number and the closing brace, which ResponsesFrames appends.
"""

from collections.abc import Iterator, Sequence

import msgspec

from mmengine.models.box_unit import Box
from mmengine.serve.text.choice_deltas import Entry
from mmengine.server.chat.token_texts import TokenTexts, clip_logprob
from mmengine.server.responses.custom_tools import call_input
from mmengine.structured_output.field_confidence.fields import FieldConfidence

_encode = msgspec.json.encode
_ADDED, _DONE = b"added", b"done"


def event(kind: bytes, text_json: bytes) -> bytes:
    """Return an event without the event number and the closing brace. `text_json`: the event's properties
    as JSON.
    """
    return b'event: response.%b\ndata: {"type":"response.%b",%b' % (kind, kind, text_json)


class OutputItem:
    """An output item. `place`: the item's index in the output. `whole`: the complete item as JSON, or b""
    before the item ends.
    """

    kind: bytes  # First part of the content's event types, such as output_text in output_text.delta.

    def __init__(self, name: str, place: int):
        self._texts: list[str] = []
        self._id, self._place = _encode(name), place
        self._where = b'"item_id":%b,"output_index":%d' % (self._id, place)
        self.whole = b""
        # The bytes before the text in each delta, built once, because most events are deltas.
        self._delta_head = b""

    def begun(self) -> Iterator[bytes]:
        self._delta_head = event(self.kind + b".delta", self._where + b',"delta":')
        yield self._event(_ADDED, self._item("in_progress", b""))

    def grown(self, text: str, entries: Sequence[Entry]) -> bytes:
        """Append `text`, and return the event with the new text. `entries`: the logprobs of the text's
        tokens.
        """
        self._texts.append(text)
        return self._delta_head + _encode(text)

    def ended(self, status: str) -> Iterator[bytes]:
        text_json = _encode("".join(self._texts))
        yield event(self.kind + b".done", b"%b,%b" % (self._where, self._said(text_json)))
        yield from self._ended(text_json)
        self.whole = self._item(status, text_json)
        yield self._event(_DONE, self.whole)

    def _event(self, what: bytes, item: bytes) -> bytes:
        return event(b"output_item." + what, b'"output_index":%d,"item":%b' % (self._place, item))

    def _said(self, text_json: bytes) -> bytes:
        """Return the properties of the event with the whole text. `text_json`: the text as JSON."""
        raise NotImplementedError

    def _item(self, status: str, text_json: bytes) -> bytes:
        """Return the item as JSON. `text_json`: the item's text as JSON, or b"" when the item begins."""
        raise NotImplementedError

    def _ended(self, text_json: bytes) -> Iterator[bytes]:
        """Yield the events between the event with the whole text and the item's last event."""
        yield from ()


class Call(OutputItem):
    """A function call. `call`: the call's id, for the client's function_call_output."""

    kind = b"function_call_arguments"

    def __init__(self, request_id: str, place: int, call: str, function: str):
        super().__init__(f"fc_{request_id}_{place}", place)
        self._call, self._function = _encode(call), _encode(function)

    def _said(self, text_json: bytes) -> bytes:
        return b'"name":%b,"arguments":%b' % (self._function, text_json)

    def _item(self, status: str, text_json: bytes) -> bytes:
        return b'{"id":%b,"type":"function_call","status":"%b","call_id":%b,"name":%b,"arguments":%b}' % (
            self._id,
            status.encode(),
            self._call,
            self._function,
            text_json or b'""',
        )


class CustomCall(OutputItem):
    """A call of a custom tool. The item's text is the tool's input. The model generates the input as a JSON
    argument, so the text is sent only when the call ends.
    """

    kind = b"custom_tool_call_input"

    def __init__(self, request_id: str, place: int, call: str, tool: str):
        super().__init__(f"ctc_{request_id}_{place}", place)
        self._call, self._tool = _encode(call), _encode(tool)
        self._arguments: list[str] = []

    def add_arguments(self, text: str) -> None:
        self._arguments.append(text)

    def ended(self, status: str) -> Iterator[bytes]:
        given = call_input("".join(self._arguments))
        yield self.grown(given, ())
        yield from super().ended(status)

    def _said(self, text_json: bytes) -> bytes:
        return b'"input":' + text_json

    def _item(self, status: str, text_json: bytes) -> bytes:
        return b'{"id":%b,"type":"custom_tool_call","call_id":%b,"name":%b,"input":%b}' % (
            self._id,
            self._call,
            self._tool,
            text_json or b'""',
        )


class _Parted(OutputItem):
    """An item with a single content part, which contains the text."""

    def __init__(self, name: str, place: int):
        super().__init__(name, place)
        self._where += b',"content_index":0'

    def begun(self) -> Iterator[bytes]:
        yield from super().begun()
        yield self._part_event(_ADDED, b'""')

    def _ended(self, text_json: bytes) -> Iterator[bytes]:
        yield self._part_event(_DONE, text_json)

    def _part_event(self, what: bytes, text_json: bytes) -> bytes:
        return event(b"content_part." + what, b'%b,"part":%b' % (self._where, self._part(text_json)))

    def _part(self, text_json: bytes) -> bytes:
        raise NotImplementedError

    def _content(self, text_json: bytes) -> bytes:
        return b"[%b]" % (self._part(text_json) if text_json else b"")


class Reasoning(_Parted):
    kind = b"reasoning_text"

    def __init__(self, request_id: str, place: int):
        super().__init__(f"rs_{request_id}_{place}", place)

    def _said(self, text_json: bytes) -> bytes:
        return b'"text":' + text_json

    def _part(self, text_json: bytes) -> bytes:
        return b'{"type":"reasoning_text","text":%b}' % text_json

    def _item(self, status: str, text_json: bytes) -> bytes:
        return b'{"id":%b,"type":"reasoning","status":"%b","summary":[],"content":%b}' % (
            self._id,
            status.encode(),
            self._content(text_json),
        )


class Message(_Parted):
    """A message with text. `texts`: the token texts for logprobs; None if the call asks for no logprobs."""

    kind = b"output_text"

    def __init__(self, request_id: str, place: int, texts: TokenTexts | None):
        super().__init__(f"msg_{request_id}_{place}", place)
        self._token_texts = texts
        self._tokens: list[bytes] = []  # The tokens with their logprobs, as JSON.
        # ResponsesFrames sets these two attributes before the item ends.
        self.field_confidence: dict[str, FieldConfidence] | None = None
        self.boxes: dict[str, Box] | None = None

    def grown(self, text: str, entries: Sequence[Entry]) -> bytes:
        if self._token_texts is None:
            self._texts.append(text)
            return b'%b%b,"logprobs":[]' % (self._delta_head, _encode(text))
        tokens = [self._token(entry) for entry in entries]
        self._tokens += tokens
        return b'%b,"logprobs":[%b]' % (super().grown(text, entries), b",".join(tokens))

    def _said(self, text_json: bytes) -> bytes:
        return b'"text":%b,"logprobs":[%b]' % (text_json, b",".join(self._tokens))

    def _part(self, text_json: bytes) -> bytes:
        more = b""
        if self.field_confidence is not None:
            more = b',"field_confidence":' + _encode(self.field_confidence)
        if self.boxes is not None:
            more += b',"boxes":' + _encode(self.boxes)
        return b'{"type":"output_text","annotations":[],%b%b}' % (self._said(text_json), more)

    def _item(self, status: str, text_json: bytes) -> bytes:
        return b'{"id":%b,"type":"message","role":"assistant","status":"%b","content":%b}' % (
            self._id,
            status.encode(),
            self._content(text_json),
        )

    def _token(self, entry: Entry) -> bytes:
        chosen, *others = (self._likely(*each) for each in entry)
        return _encode({**chosen, "top_logprobs": others})

    def _likely(self, token: int, logprob: float) -> dict[str, object]:
        assert self._token_texts is not None
        text, data = self._token_texts.of(token)
        return {"token": text, "logprob": clip_logprob(logprob), "bytes": list(data)}

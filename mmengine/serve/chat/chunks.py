"""Builds stream chunks in OpenAI's format. The server sends them as server-sent events."""

from collections.abc import Iterator

import msgspec

from mmengine.events.call_ids import call_id
from mmengine.serve.text.choice_deltas import ArgumentError, ChoiceDelta, Delta, Entry
from mmengine.serve.text.tool_call_parser import CallDelta
from mmengine.structured_output.field_confidence.fields import FieldConfidence


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call's new text.

    The first delta has the function's `name`; later deltas have JSON `arguments`.
    """

    name: str | None = None
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New text for the tool call with this `index`.

    The call's first delta has `id`, `type` and the function's name.
    """

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class MessageDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New text for a message. The delta in the first chunk has the `role`."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None
    field_confidence: dict[str, FieldConfidence] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """New text for the choice with this `index`.

    In the choice's last chunk, `finish_reason`, `stop_reason` and `argument_errors` have the same values as
    in an answer without streaming. If the request asks for confidences, the last chunk's delta has
    `field_confidence`. If the request asks for logprobs, `logprobs` covers the tokens since the previous
    chunk.
    """

    index: int
    delta: MessageDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[Entry, ...] | None = None
    argument_errors: tuple[ArgumentError, ...] = ()


class ChatChunk(msgspec.Struct, frozen=True):
    """A stream chunk with new text for a single choice."""

    request_id: str
    choices: tuple[ChunkChoice]


BEGINNING = MessageDelta(role="assistant", content="")


def message_delta(request_id: str, index: int, delta: Delta) -> MessageDelta:
    """Return the message delta in OpenAI's format for a delta in the choice with this `index`."""
    return MessageDelta(
        content=delta.content or None,
        reasoning_content=delta.reasoning or None,
        tool_calls=None if delta.call is None else (_call(request_id, index, delta.call),),
        field_confidence=delta.field_confidence,
    )


def _call(request_id: str, index: int, call: CallDelta) -> ToolCallDelta:
    if not call.name:
        return ToolCallDelta(index=call.number, function=FunctionDelta(arguments=call.arguments))
    return ToolCallDelta(
        index=call.number,
        id=call_id(request_id, index, call.number),
        type="function",
        function=FunctionDelta(name=call.name, arguments=""),
    )


def end_of(rest: Delta) -> tuple[Delta, ...]:
    """Split an answer's last delta into the remaining text, if any, and a final delta without text."""
    if not rest.content and not rest.reasoning:
        return (rest,)
    end = Delta(
        num_tokens=rest.num_tokens,
        argument_errors=rest.argument_errors,
        field_confidence=rest.field_confidence,
        boxes=rest.boxes,
    )
    return rest._replace(argument_errors=(), field_confidence=None, boxes=None), end


def chunks_of(request_id: str, index: int, choice_delta: ChoiceDelta) -> Iterator[ChatChunk]:
    """Yield the chunks for a delta in the choice with this `index`."""
    delta, finish_reason, stop_reason = choice_delta
    *before, last = (delta,) if finish_reason is None else end_of(delta)
    for each in before:
        message = message_delta(request_id, index, each)
        yield ChatChunk(request_id, (ChunkChoice(index, message, logprobs=each.logprobs or None),))
    message = message_delta(request_id, index, last)
    choice = ChunkChoice(
        index, message, finish_reason, stop_reason, last.logprobs or None, last.argument_errors
    )
    yield ChatChunk(request_id, (choice,))

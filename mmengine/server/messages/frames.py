"""Renders answers in Anthropic's Messages format, as stream events or as a whole body.

The bytes depend only on the tokens, the request id and the envelope (call data in the log). Therefore a
repeated stream has the same bytes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import msgspec

from mmengine.core.executor import PromptLogprobs
from mmengine.events.call_ids import call_id
from mmengine.models.box_unit import Box
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.text.choice_deltas import ArgumentError, Delta
from mmengine.serve.text.tool_call_parser import CallDelta
from mmengine.server.chat.answer_ids import answer_id
from mmengine.server.chat.chat_frames import FrameTails, Usage
from mmengine.server.chat.parsed_request import Envelope, Json
from mmengine.server.http.errors import ApiError
from mmengine.server.messages.errors import error_json
from mmengine.structured_output.field_confidence.fields import FieldConfidence

CALL_PREFIX = "toolu_"
_encode = msgspec.json.encode
_decode_object = msgspec.json.Decoder(dict[str, object]).decode


class MessagesFrames:
    """Renders messages as frames or bodies. A block contains only thinking, only text, or a single tool call.
    Other content closes the open block and opens a new block.
    """

    done = b""

    def __init__(self, request_id: str, envelope: Envelope):
        self._request_id, self.tails = request_id, FrameTails("last")
        self._about: Json = {"id": answer_id("messages", request_id), "type": "message", "role": "assistant"}
        self._about["model"] = envelope.model
        self._kind = ""  # Type of the open block, or "".
        self._number = 0  # Number of closed blocks.
        # The bytes before the text in each delta of the open block, built once per block.
        self._head = b""
        self._digest = hashlib.sha256()  # Digest of the open thinking block.
        self._stop: tuple[str, str | None] = ("", None)
        self._errors: tuple[ArgumentError, ...] = ()
        self._fields: dict[str, FieldConfidence] | None = None
        self._boxes: dict[str, Box] | None = None
        self._has_calls = False

    def first(self, index: int, scores: PromptLogprobs | None = None) -> bytes:
        usage = _usage(self.tails.num_prompt(index), 0, 0)
        message = {**self._about, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", {"message": message})

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.content and self._kind == "text":  # Most deltas take this path.
            return b"%b%b}}\n\n" % (self._head, _encode(delta.content))
        data = b""
        if delta.reasoning:
            if self._kind != "thinking":
                data += self._open(
                    "thinking", {"thinking": "", "signature": ""}, "thinking_delta", "thinking"
                )
                self._digest = hashlib.sha256()
            self._digest.update(delta.reasoning.encode())
            data += b"%b%b}}\n\n" % (self._head, _encode(delta.reasoning))
        if delta.content:
            if self._kind != "text":
                data += self._open("text", {"text": ""}, "text_delta", "text")
            data += b"%b%b}}\n\n" % (self._head, _encode(delta.content))
        return data if delta.call is None else data + self._called(delta.call)

    def _called(self, call: CallDelta) -> bytes:
        data = b""
        if call.name:
            block = {"id": self._call_id(call.number), "name": call.name, "input": {}}
            self._has_calls = True
            data = self._open("tool_use", block, "input_json_delta", "partial_json")
        return data + b"%b%b}}\n\n" % (self._head, _encode(call.arguments)) if call.arguments else data

    def _call_id(self, number: int) -> str:
        return CALL_PREFIX + call_id(self._request_id, 0, number).removeprefix("call_")

    def _open(self, kind: str, block: Mapping[str, object], grows: str, field: str) -> bytes:
        """Close the open block, and begin another block. `grows`: the type of the block's deltas. `field`:
        the field that contains the text of a delta.
        """
        data = self._close()
        self._kind = kind
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (self._number, grows.encode(), field.encode())
        )
        began = {"index": self._number, "content_block": {"type": kind, **block}}
        return data + _event("content_block_start", began)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        data, index = b"", self._number
        if self._kind == "thinking":
            signed = {"type": "signature_delta", "signature": self._digest.hexdigest()}
            data = _event("content_block_delta", {"index": index, "delta": signed})
        self._kind, self._number = "", index + 1
        return data + _event("content_block_stop", {"index": index})

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        data = self.delta(index, rest)
        self._stop = _stop(finish_reason, stop_reason, calls=self._has_calls)
        self._errors, self._fields, self._boxes = rest.argument_errors, rest.field_confidence, rest.boxes
        return data + self._close()

    def usage(self, usage: Usage) -> bytes:
        """Return the last two events."""
        reason, sequence = self._stop
        data: Json = {
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _whole_usage(usage),
        }
        if self._errors:
            data["argument_errors"] = self._errors
        if self._fields is not None:
            data["field_confidence"] = self._fields
        if self._boxes is not None:
            data["boxes"] = self._boxes
        return _event("message_delta", data) + _event("message_stop", {})

    def whole(self, choices: Sequence[AccumulatedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        blocks: list[Json] = []
        if choice.reasoning:
            text = "".join(choice.reasoning)
            signature = hashlib.sha256(text.encode()).hexdigest()
            blocks.append({"type": "thinking", "thinking": text, "signature": signature})
        if choice.content:
            blocks.append({"type": "text", "text": "".join(choice.content)})
        for number, (name, arguments) in enumerate(zip(choice.names, choice.arguments, strict=True)):
            given = _arguments_object("".join(arguments))
            blocks.append({"type": "tool_use", "id": self._call_id(number), "name": name, "input": given})
        reason, sequence = _stop(choice.finish_reason, choice.stop_reason, calls=bool(choice.names))
        data: Json = {"content": blocks, "stop_reason": reason, "stop_sequence": sequence}
        if choice.argument_errors:
            data["argument_errors"] = choice.argument_errors
        if choice.field_confidence is not None:
            data["field_confidence"] = choice.field_confidence
        if choice.boxes is not None:
            data["boxes"] = choice.boxes
        return _encode({**self._about, **data, "usage": _whole_usage(usage)})

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_json(error, self._request_id)


def _event(kind: str, data: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **data}))


def _stop(finish_reason: str, stop_reason: str | int | None, *, calls: bool) -> tuple[str, str | None]:
    """Return stop_reason and stop_sequence. `calls`: whether the answer contains tool calls."""
    if finish_reason in ("length", "repetition"):  # Anthropic's API has no stop reason for a repetition.
        return "max_tokens", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "tool_use" if calls else "end_turn", None


def _arguments_object(arguments: str) -> Json | msgspec.Raw:
    """Return a tool call's arguments as an object.

    Valid JSON that msgspec cannot represent (half of a surrogate pair, 1e999) stays as the model wrote it.
    Arguments that are incomplete or nested too deeply become an empty object.
    """
    try:
        return _decode_object(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return msgspec.Raw(arguments.encode()) if _is_object(arguments) else {}


def _is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    try:  # Numbers are not converted, because Python refuses to convert integers with thousands of digits.
        return isinstance(json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> object:
    """Raise ValueError for NaN and Infinity, which Python's parser accepts but JSON does not allow."""
    raise ValueError(name)


def _usage(num_prompt: int, num_cached: int, num_output: int) -> Json:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def _whole_usage(usage: Usage) -> Json:
    """Convert a chat completion's usage to Anthropic's names."""
    prompt, completion = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    num_prompt, num_output = usage["prompt_tokens"], usage["completion_tokens"]
    assert isinstance(prompt, dict) and isinstance(completion, dict)
    assert isinstance(num_prompt, int) and isinstance(num_output, int)
    found = _usage(num_prompt, prompt["cached_tokens"], num_output)
    found["output_tokens_details"] = {"thinking_tokens": completion["reasoning_tokens"]}
    return found

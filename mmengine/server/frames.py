"""Answers as OpenAI's chat API writes them: frames of a stream, and whole ones. Pure functions of what was
asked and answered; `created` and the id come from the request, as the log has it.

Most of a frame is the same for a whole stream, and is written once.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from mmengine.serve.call_parser import CallDelta, call_id
from mmengine.serve.chat import WholeChoice
from mmengine.serve.deltas import Delta, Entry
from mmengine.server.asked import Envelope
from mmengine.server.errors import ApiError
from mmengine.server.token_texts import TokenTexts, clipped

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encode = msgspec.json.encode
Usage = dict[str, object]


class Frames(Protocol):
    """How a route writes its answers."""

    def first(self, index: int) -> bytes: ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...


def error_frame(error: ApiError) -> bytes:
    return b"data: " + error.json() + b"\n\n"


class ChatFrames:
    """`texts`: for logprobs; None: nobody asked for them. `with_usage`: a last frame has the usage, and all
    others say that they have none."""

    def __init__(self, request_id: str, envelope: Envelope, texts: TokenTexts | None, with_usage: bool):
        self._texts, self._request_id = texts, request_id
        self._about = {"id": f"chatcmpl-{request_id}", "created": envelope.created, "model": envelope.model}
        head = {"id": self._about["id"], "object": "chat.completion.chunk", **self._about}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"

    def _frame(self, index: int, delta: bytes, logprobs: bytes, end: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            delta,
            logprobs,
            end,
            self._tail,
        )

    def first(self, index: int) -> bytes:
        return self._frame(index, b'{"role":"assistant","content":""}', b"null", b"null")

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.call is not None:
            call = self._call(index, delta.call)
            return self._frame(index, call, self._logprobs(delta.logprobs), b"null")
        said: dict[str, str] = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        return self._frame(index, _encode(said), self._logprobs(delta.logprobs), b"null")

    def _call(self, index: int, call: CallDelta) -> bytes:
        if not call.name:
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
                call.number,
                _encode(call.arguments),
            )
        function = {"name": call.name, "arguments": ""}
        about = {
            "index": call.number,
            "id": call_id(self._request_id, index, call.number),
            "type": "function",
        }
        return _encode({"tool_calls": [{**about, "function": function}]})

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        before = b""
        end = b'"%b","stop_reason":%b' % (finish_reason.encode(), _encode(stop_reason))
        if rest.argument_errors:
            end += b',"argument_errors":' + _encode(rest.argument_errors)
        if rest.content or rest.reasoning:
            before, rest = self.delta(index, rest), Delta()
        return before + self._frame(index, b"{}", self._logprobs(rest.logprobs), end)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        return _encode(
            {
                "id": self._about["id"],
                "object": "chat.completion",
                **self._about,
                "choices": [self._choice(choice) for choice in choices],
                "usage": usage,
            }
        )

    def _choice(self, choice: WholeChoice) -> dict[str, object]:
        said = choice.message(self._request_id)
        message: dict[str, object] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning_content is not None:
            message["reasoning_content"] = said.reasoning_content
        if said.tool_calls is not None:
            message["tool_calls"] = said.tool_calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": msgspec.Raw(self._logprobs(choice.logprobs, whole=True)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"argument_errors": choice.argument_errors} if choice.argument_errors else {}),
        }

    def _logprobs(self, entries: Sequence[Entry], *, whole: bool = False) -> bytes:
        if self._texts is None or not (entries or whole):
            return b"null"
        content = [
            {**self._token(*entry[0]), "top_logprobs": [self._token(*other) for other in entry[1:]]}
            for entry in entries
        ]
        return _encode({"content": content, "refusal": None})

    def _token(self, token: int, logprob: float) -> dict[str, object]:
        assert self._texts is not None
        text, data = self._texts.of(token)
        return {"token": text, "logprob": clipped(logprob), "bytes": list(data)}

"""Answers as OpenAI's chat API writes them: frames of a stream, and whole ones. Pure functions of what was
asked and answered; `created` and the id come from the request, as the log has it.

Most of a frame is the same for a whole stream, and is written once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from mmengine.server.asked import Envelope
from mmengine.server.deltas import Delta, Entry
from mmengine.server.errors import ApiError
from mmengine.server.token_texts import TokenTexts, clipped

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encode = msgspec.json.encode
Usage = dict[str, object]


@dataclass(slots=True)
class WholeChoice:
    """What the deltas of a choice add up to."""

    index: int
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        if delta.content:
            self.content.append(delta.content)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)


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
        self._texts = texts
        self._about = {"id": f"chatcmpl-{request_id}", "created": envelope.created, "model": envelope.model}
        head = {"id": self._about["id"], "object": "chat.completion.chunk", **self._about}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._text_tail = b'},"logprobs":null,"finish_reason":null' + self._tail
        self._text_heads: dict[int, bytes] = {}  # of frames with nothing but content, by index

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
        if not delta.reasoning and not delta.logprobs:
            if (head := self._text_heads.get(index)) is None:
                head = self._text_heads[index] = b'%b{"index":%d,"delta":{"content":' % (self._head, index)
            return head + _encode(delta.content) + self._text_tail
        said: dict[str, str] = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        return self._frame(index, _encode(said), self._logprobs(delta.logprobs), b"null")

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        before = b""
        if rest.content or rest.reasoning:
            before, rest = self.delta(index, rest), Delta()
        end = b'"%b","stop_reason":%b' % (finish_reason.encode(), _encode(stop_reason))
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
        message: dict[str, object] = {
            "role": "assistant",
            "content": "".join(choice.content),
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": msgspec.Raw(self._logprobs(choice.logprobs, whole=True)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
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

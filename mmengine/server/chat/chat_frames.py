"""Renders answers in OpenAI's chat format, as stream frames or as a whole body. A frame is the text of one or
more server-sent events. The bytes depend only on the request and the answer. `id` comes from the request's
id, and `created` from the envelope (the server's data in the log). Bytes that all frames share are encoded
only once.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from mmengine.core.executor import PromptLogprobs
from mmengine.serve.chat.chunks import BEGINNING, end_of, message_delta
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.text.choice_deltas import Delta, Entry
from mmengine.server.chat.answer_ids import answer_id
from mmengine.server.chat.parsed_request import Envelope, UsageFrames
from mmengine.server.chat.token_texts import TokenTexts, clip_logprob
from mmengine.server.http.errors import ApiError

_encode = msgspec.json.encode
_BEGINNING = _encode(BEGINNING)
Usage = dict[str, object]


class FrameTails:
    """The ends of frames, with or without usage. `usage_frames`: if "always", each frame has the choice's
    usage so far. If "last", the usage is null, because only the stream's last frame has usage. If "none",
    there is no usage field. `plain`: the end that all frames share; b"" for "always", because the ends then
    differ.
    """

    def __init__(self, usage_frames: UsageFrames):
        ends = {"none": b"}]}\n\n", "last": b'}],"usage":null}\n\n', "always": b""}
        self.plain = ends[usage_frames]
        self._num_prompt: dict[int, int] = {}  # Maps each choice to the number of tokens in its prompt.

    def set_prompt(self, indices: Iterable[int], num_tokens: int) -> None:
        """Set the number of prompt tokens for these choices, before their first frame."""
        self._num_prompt.update(dict.fromkeys(indices, num_tokens))

    def num_prompt(self, index: int) -> int:
        return self._num_prompt[index]

    def of(self, index: int, num_tokens: int) -> bytes:
        if self.plain:
            return self.plain
        prompt = self._num_prompt[index]
        return b'}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            prompt,
            num_tokens,
            prompt + num_tokens,
        )


class Frames(Protocol):
    """Renders answers in the format of an API."""

    tails: FrameTails
    done: bytes  # Sent after the last frame of a stream.

    def first(self, index: int, scores: PromptLogprobs | None = None) -> bytes:
        """Return a choice's first frame. `scores`: the prompt's logprobs, for a call with echo and
        logprobs.
        """

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def error(self, error: ApiError) -> bytes:
        """Return the frame that ends a stream with an error."""

    def whole(self, choices: Sequence[AccumulatedChoice], usage: Usage) -> bytes: ...


class OpenAiFrames:
    """Base class for the formats of OpenAI's APIs: the errors, and the stream's end."""

    done = b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.json() + b"\n\n"


class ChatFrames(OpenAiFrames):
    """Renders chat completions as frames or bodies.

    `texts`: the token texts for logprobs; None for an answer without logprobs. `names_reasoning_twice`:
    whether messages repeat `reasoning_content` as `reasoning`.
    """

    def __init__(
        self,
        request_id: str,
        envelope: Envelope,
        texts: TokenTexts | None,
        usage_frames: UsageFrames = "none",
        *,
        names_reasoning_twice: bool = False,
    ):
        self._texts, self._request_id, self.tails = texts, request_id, FrameTails(usage_frames)
        self._names_reasoning_twice = names_reasoning_twice
        self._about = {
            "id": answer_id("chat", request_id),
            "created": envelope.created,
            "model": envelope.model,
        }
        head = {"id": self._about["id"], "object": "chat.completion.chunk", **self._about}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        # Maps each choice to its frames' encoded beginning. Used for frames that contain only content.
        self._text_heads: dict[int, bytes] = {}

    def _frame(self, index: int, delta: bytes, logprobs: bytes, end: bytes, num_tokens: int) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            delta,
            logprobs,
            end,
            self.tails.of(index, num_tokens),
        )

    def first(self, index: int, scores: PromptLogprobs | None = None) -> bytes:
        return self._frame(index, _BEGINNING, b"null", b"null", 0)

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.call is None and not delta.reasoning and not delta.logprobs:
            if (head := self._text_heads.get(index)) is None:
                head = self._text_heads[index] = b'%b{"index":%d,"delta":{"content":' % (self._head, index)
            tail = self.tails.plain or self.tails.of(index, delta.num_tokens)
            return b'%b%b},"logprobs":null,"finish_reason":null%b' % (head, _encode(delta.content), tail)
        message = message_delta(self._request_id, index, delta)
        encoded = _encode(message)
        if message.reasoning_content and self._names_reasoning_twice:
            encoded = b'%b,"reasoning":%b}' % (encoded[:-1], _encode(message.reasoning_content))
        return self._frame(index, encoded, self._logprobs(delta.logprobs), b"null", delta.num_tokens)

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        *before, last = end_of(rest)
        end = b'"%b","stop_reason":%b' % (finish_reason.encode(), _encode(stop_reason))
        if last.argument_errors:
            end += b',"argument_errors":' + _encode(last.argument_errors)
        message: dict[str, object] = {}
        if last.field_confidence is not None:
            message["field_confidence"] = last.field_confidence
        if last.boxes is not None:
            message["boxes"] = last.boxes
        frame = self._frame(index, _encode(message), self._logprobs(last.logprobs), end, last.num_tokens)
        return b"".join(self.delta(index, each) for each in before) + frame

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, choices: Sequence[AccumulatedChoice], usage: Usage) -> bytes:
        return _encode(
            {
                "id": self._about["id"],
                "object": "chat.completion",
                **self._about,
                "choices": [self._choice(choice) for choice in choices],
                "usage": usage,
            }
        )

    def _choice(self, choice: AccumulatedChoice) -> dict[str, object]:
        answer = choice.message(self._request_id)
        message: dict[str, object] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning_content is not None:
            message["reasoning_content"] = answer.reasoning_content
            if self._names_reasoning_twice:
                message["reasoning"] = answer.reasoning_content
        if answer.tool_calls is not None:
            message["tool_calls"] = answer.tool_calls
        if answer.field_confidence is not None:
            message["field_confidence"] = answer.field_confidence
        if choice.boxes is not None:
            message["boxes"] = choice.boxes
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
        return {"token": text, "logprob": clip_logprob(logprob), "bytes": list(data)}

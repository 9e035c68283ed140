"""Answers as OpenAI's older completions API writes them."""

from collections.abc import Sequence

import msgspec

from mmengine.serve.chat import WholeChoice
from mmengine.serve.deltas import Delta, Entry
from mmengine.server.asked import Envelope
from mmengine.server.frames import Usage
from mmengine.server.token_texts import TokenTexts, clipped

_encode = msgspec.json.encode


class CompletionFrames:
    """`echoed`: of each prompt, what its answers begin with; `per_prompt`: how many answers each has."""

    def __init__(
        self,
        request_id: str,
        envelope: Envelope,
        texts: TokenTexts | None,
        with_usage: bool,
        echoed: Sequence[str] = (),
        per_prompt: int = 1,
    ):
        self._texts, self._echoed, self._per_prompt = texts, echoed, per_prompt
        self._about = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": envelope.created,
            "model": envelope.model,
        }
        self._head = b"data: " + _encode(self._about)[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._offsets: dict[int, int] = {}  # characters of a choice that frames told of

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._per_prompt] if self._echoed else ""

    def _frame(self, index: int, delta: Delta, end: bytes) -> bytes:
        text = delta.content + delta.reasoning
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        logprobs = _encode(self._logprobs(delta.logprobs, offset))
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            _encode(text),
            logprobs,
            end,
            self._tail,
        )

    def first(self, index: int) -> bytes:
        echoed = self._echo(index)
        return self._frame(index, Delta(echoed), b"null") if echoed else b""

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._frame(index, delta, b"null")

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        end = b'"%b","stop_reason":%b' % (finish_reason.encode(), _encode(stop_reason))
        return self._frame(index, rest, end)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        made = [
            {
                "index": choice.index,
                "text": self._echo(choice.index) + "".join(choice.reasoning) + "".join(choice.content),
                "logprobs": self._logprobs(choice.logprobs, 0, whole=True),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in choices
        ]
        return _encode({**self._about, "choices": made, "usage": usage})

    def _logprobs(
        self, entries: Sequence[Entry], offset: int, *, whole: bool = False
    ) -> dict[str, object] | None:
        if self._texts is None or not (entries or whole):
            return None
        tokens, logprobs, top, offsets = [], [], [], []
        for entry in entries:
            text, _ = self._texts.of(entry[0][0])
            tokens.append(text)
            logprobs.append(clipped(entry[0][1]))
            top.append({self._texts.of(token)[0]: clipped(logprob) for token, logprob in entry})
            offsets.append(offset)
            offset += len(text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

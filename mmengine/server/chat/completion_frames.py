"""Renders answers in OpenAI's completions format."""

import codecs
import math
from collections.abc import Sequence

import msgspec

from mmengine.core.executor import PromptLogprobs
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.text.choice_deltas import Delta, Entry
from mmengine.serve.text.request_output import entries_of
from mmengine.server.chat.answer_ids import answer_id
from mmengine.server.chat.chat_frames import FrameTails, OpenAiFrames, Usage
from mmengine.server.chat.parsed_request import Envelope, UsageFrames
from mmengine.server.chat.token_texts import TokenTexts, clip_logprob

_encode = msgspec.json.encode


class CompletionFrames(OpenAiFrames):
    """Renders completions as frames or bodies.

    `echo_texts`: for each prompt, its text, with which its answers begin; empty without echo. `per_prompt`:
    choices per prompt.
    """

    def __init__(
        self,
        request_id: str,
        envelope: Envelope,
        texts: TokenTexts | None,
        usage_frames: UsageFrames,
        echo_texts: Sequence[str] = (),
        per_prompt: int = 1,
    ):
        self._texts, self._echo_texts, self._per_prompt = texts, echo_texts, per_prompt
        self._about = {
            "id": answer_id("completion", request_id),
            "object": "text_completion",
            "created": envelope.created,
            "model": envelope.model,
        }
        self._head = b"data: " + _encode(self._about)[:-1] + b',"choices":['
        self.tails = FrameTails(usage_frames)
        self._offsets: dict[int, int] = {}  # For each choice, how many characters earlier frames contain.

    def _echo(self, index: int) -> str:
        return self._echo_texts[index // self._per_prompt] if self._echo_texts else ""

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
            self.tails.of(index, delta.num_tokens),
        )

    def first(self, index: int, scores: PromptLogprobs | None = None) -> bytes:
        echo_texts = self._echo(index)
        entries = () if scores is None else tuple(entries_of(scores))
        return self._frame(index, Delta(echo_texts, "", entries), b"null") if echo_texts or entries else b""

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._frame(index, delta, b"null")

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        end = b'"%b","stop_reason":%b' % (finish_reason.encode(), _encode(stop_reason))
        return self._frame(index, rest, end)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, choices: Sequence[AccumulatedChoice], usage: Usage) -> bytes:
        made = [
            {
                "index": choice.index,
                "text": self._echo(choice.index) + "".join(choice.reasoning) + "".join(choice.content),
                "logprobs": self._logprobs(_all_entries(choice), 0, whole=True),
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
        tokens, offsets = [], []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        for entry in entries:
            text, shown = self._texts.of(entry[0][0])
            tokens.append(text)
            if math.isnan(entry[0][1]) and not logprobs and not offset:
                logprobs.append(None)  # The first token of a prompt has no logprob.
                top.append(None)
            else:
                logprobs.append(clip_logprob(entry[0][1]))
                top.append({self._texts.of(token)[0]: clip_logprob(logprob) for token, logprob in entry})
            offsets.append(offset)
            if entry[0][0] not in self._texts.special_ids:
                # A character that several tokens form counts with its last token.
                offset += len(decode(shown))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _all_entries(choice: AccumulatedChoice) -> list[Entry]:
    return [*(() if choice.scores is None else entries_of(choice.scores)), *choice.logprobs]

"""Renders answers in OpenAI's completions format, as stream frames or as a whole body."""

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
from mmengine.server.chat.text_offsets import TextOffsets
from mmengine.server.chat.token_texts import TokenTexts, clip_logprob

_encode = msgspec.json.encode


class CompletionFrames(OpenAiFrames):
    """Renders completions as frames or bodies.

    `echo_texts`: each prompt's text, which precedes the prompt's answers; empty without echo. `per_prompt`:
    the number of choices for each prompt.
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
        self._offsets: dict[int, TextOffsets] = {}
        # Maps each choice to the number of characters that its frames contain so far.
        self._num_chars: dict[int, int] = {}

    def _echo(self, index: int) -> str:
        return self._echo_texts[index // self._per_prompt] if self._echo_texts else ""

    def _offsets_of(self, index: int) -> TextOffsets | None:
        if self._texts is None:
            return None
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._texts, self._echo(index))
        return self._offsets[index]

    def _frame(self, index: int, delta: Delta, end: bytes, offsets: Sequence[int] = ()) -> bytes:
        text = delta.content + delta.reasoning
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            index,
            _encode(text),
            _encode(self._logprobs(delta.logprobs, offsets) if delta.logprobs else None),
            end,
            self.tails.of(index, delta.num_tokens),
        )

    def first(self, index: int, scores: PromptLogprobs | None = None) -> bytes:
        echo_text, offsets = self._echo(index), self._offsets_of(index)
        entries = () if scores is None else tuple(entries_of(scores))
        if not echo_text and not entries:
            return b""
        self._num_chars[index] = len(echo_text)
        places = [] if offsets is None else offsets.of_prompt(_tokens(entries))
        return self._frame(index, Delta(echo_text, "", entries), b"null", places)

    def delta(self, index: int, delta: Delta) -> bytes:
        offsets = self._offsets_of(index)
        if offsets is None:
            return self._frame(index, delta, b"null")
        self._num_chars[index] = self._num_chars.get(index, 0) + len(delta.content) + len(delta.reasoning)
        return self._frame(index, delta, b"null", offsets.of(_tokens(delta.logprobs), delta.markers))

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        end = b'"%b","stop_reason":%b' % (finish_reason.encode(), _encode(stop_reason))
        if rest.field_confidence is not None:
            end += b',"field_confidence":' + _encode(rest.field_confidence)
        offsets = self._offsets_of(index)
        if offsets is None:
            return self._frame(index, rest, end)
        num_chars = self._num_chars.get(index, 0) + len(rest.content) + len(rest.reasoning)
        return self._frame(index, rest, end, offsets.of(_tokens(rest.logprobs), rest.markers, num_chars))

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, choices: Sequence[AccumulatedChoice], usage: Usage) -> bytes:
        made = []
        for choice in choices:
            text = self._echo(choice.index) + "".join(choice.reasoning) + "".join(choice.content)
            made.append(
                {
                    "index": choice.index,
                    "text": text,
                    "logprobs": self._all_logprobs(choice, len(text)),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    **({} if (fields := choice.field_confidence) is None else {"field_confidence": fields}),
                }
            )
        return _encode({**self._about, "choices": made, "usage": usage})

    def _all_logprobs(self, choice: AccumulatedChoice, num_chars: int) -> dict[str, object] | None:
        offsets = self._offsets_of(choice.index)
        if offsets is None:
            return None
        prompt = () if choice.scores is None else entries_of(choice.scores)
        places = offsets.of_prompt(_tokens(prompt)) if prompt else []
        places += offsets.of(_tokens(choice.logprobs), choice.markers, num_chars)
        return self._logprobs([*prompt, *choice.logprobs], places)

    def _logprobs(self, entries: Sequence[Entry], offsets: Sequence[int]) -> dict[str, object] | None:
        """Return the logprobs for tokens that begin at `offsets`, or None if not requested."""
        if self._texts is None:
            return None
        text_of = self._texts.of
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for entry, offset in zip(entries, offsets, strict=True):
            if math.isnan(entry[0][1]) and not logprobs and not offset:
                logprobs.append(None)  # The first token of a prompt has no logprob.
                top.append(None)
            else:
                logprobs.append(clip_logprob(entry[0][1]))
                top.append({text_of(token)[0]: clip_logprob(logprob) for token, logprob in entry})
        tokens = [text_of(token)[0] for token in _tokens(entries)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _tokens(entries: Sequence[Entry]) -> list[int]:
    """Return each entry's chosen token id, without the alternatives."""
    return [entry[0][0] for entry in entries]

"""Texts of answers, made by the thread that reads them and not by the thread that computes."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from mmengine.models.plugin import Tokenizer
from mmengine.request import SamplingParams
from mmengine.serve.answers import Choice, Completion, RequestOutput
from mmengine.serve.detokenize import TextStream, answer_text
from mmengine.structured_output.opening import end_of


class AnswerTexts:
    """Fills in the texts of one request's news, which have to come in their order. With `pieces` False,
    only the texts of its whole answers."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams):
        self._tokenizer, self._stop, self._min_tokens = tokenizer, sampling.stop, sampling.min_stop_tokens
        self.pieces = True
        self._streams: dict[int, TextStream] = {}  # of choices, by index

    def fill(self, output: RequestOutput) -> RequestOutput:
        text = self._piece(output) if self.pieces else ""
        completion = output.completion and self._complete(output.completion)
        return msgspec.structs.replace(output, text=text, completion=completion)

    def _piece(self, output: RequestOutput) -> str:
        stream = self._streams.get(output.index)
        if stream is None:
            stream = TextStream(self._tokenizer, stop=self._stop, min_tokens=self._min_tokens)
            self._streams[output.index] = stream
        text = stream.push(output.token_ids)
        return text if output.finish_reason is None else text + stream.finish()

    def _complete(self, completion: Completion) -> Completion:
        choices = [
            with_texts(choice, self._tokenizer, self._stop, self._min_tokens) for choice in completion.choices
        ]
        return replace(completion, choices=choices)


def with_texts(choice: Choice, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int) -> Choice:
    """A choice of which only the tokens are known. No stop string goes with a form that waits for the end of
    reasoning."""
    text = answer_text(tokenizer, choice.token_ids, stop=stop, min_tokens=min_tokens)
    if not choice.after:
        return replace(choice, text=text, content=text)
    end = end_of(choice.token_ids, choice.after)
    if end is None:
        return replace(choice, text=text, reasoning=text, content=None)
    before, behind = choice.token_ids[: end - len(choice.after)], choice.token_ids[end:]
    return replace(choice, text=text, reasoning=tokenizer.decode(before), content=tokenizer.decode(behind))

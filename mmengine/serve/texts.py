"""Texts of answers, made by the thread that reads them and not by the one that computes."""

from dataclasses import replace

import msgspec

from mmengine.models.plugin import Tokenizer
from mmengine.request import SamplingParams
from mmengine.serve.answers import Completion, RequestOutput
from mmengine.serve.detokenize import TextStream, answer_text


class AnswerTexts:
    """Fills in the texts of one request's news, which have to come in their order. With `pieces` False,
    only those of its whole answers."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams):
        self._tokenizer, self._stop, self._min_tokens = tokenizer, sampling.stop, sampling.min_tokens
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
        texts = (
            answer_text(self._tokenizer, choice.token_ids, stop=self._stop, min_tokens=self._min_tokens)
            for choice in completion.choices
        )
        choices = [replace(choice, text=text) for choice, text in zip(completion.choices, texts, strict=True)]
        return replace(completion, choices=choices)

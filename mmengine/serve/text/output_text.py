"""Decodes output tokens on the reader's thread, to save time on the engine's thread."""

from dataclasses import replace

import msgspec

from mmengine.models.plugin import Tokenizer
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.text.detokenizer import Stops, TextStream
from mmengine.serve.text.field_confidence import answer_confidence
from mmengine.serve.text.request_output import Choice, Completion, RequestOutput
from mmengine.structured_output.grammar_start import find_end


class OutputText:
    """Adds texts to a request's outputs. Outputs must be passed in order. If `pieces` is False, only complete
    answers get a text. For requests with a response format, `grammar` must be set before the first output.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams):
        self._tokenizer, self._sampling = tokenizer, sampling
        self.grammar: GrammarRequest | None = None
        self.pieces = True
        self._streams: dict[int, TextStream] = {}  # by choice index

    def fill(self, output: RequestOutput) -> RequestOutput:
        text = self._piece(output) if self.pieces else ""
        completion = output.completion and self._complete(output.completion)
        return msgspec.structs.replace(output, text=text, completion=completion)

    def _piece(self, output: RequestOutput) -> str:
        stream = self._streams.get(output.index)
        if stream is None:
            stream = self._stops._replace(after=output.after).stream(self._tokenizer)
            self._streams[output.index] = stream
        text = stream.push(output.token_ids)
        return text if output.finish_reason is None else text + stream.finish()

    def _complete(self, completion: Completion) -> Completion:
        given = self._tokenizer, self._stops, self.grammar
        return replace(completion, choices=[with_texts(choice, *given) for choice in completion.choices])

    @property
    def _stops(self) -> Stops:
        return Stops.of(self._sampling, self.grammar)


def with_texts(choice: Choice, tokenizer: Tokenizer, stops: Stops, grammar: GrammarRequest | None) -> Choice:
    """Return a copy of `choice` with the decoded text and the confidences for the answer's fields.
    `choice.after` are the tokens that end the reasoning. Stop strings apply only after the reasoning.
    """
    fields = answer_confidence(tokenizer, grammar, choice.token_ids, choice.confidences, choice.after)
    if fields is not None:
        choice = replace(choice, field_confidence=fields)
    text = stops._replace(after=choice.after).text(tokenizer, choice.token_ids)
    if not choice.after:
        return replace(choice, text=text, content=text)
    end = find_end(choice.token_ids, choice.after)
    if end is None:
        return replace(choice, text=text, reasoning=text, content=None)
    before, after = choice.token_ids[: end - len(choice.after)], choice.token_ids[end:]
    content = stops._replace(after=()).text(tokenizer, after)
    return replace(choice, text=text, reasoning=tokenizer.decode(before), content=content)

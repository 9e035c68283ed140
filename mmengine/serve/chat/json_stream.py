"""Parses a JSON answer while the model generates it, and returns partial values."""

from typing import Any

from mmengine.models.plugin import Tokenizer
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.request_output import RequestOutput, require_success
from mmengine.serve.text.response_format import ConfidentValue, decode_answer
from mmengine.structured_output.grammar_start import find_end
from mmengine.structured_output.partial_json import PartialJson


class JsonStream:
    """Converts a request's outputs to partial values for `schema`, and the last output to the whole value.

    Reasoning is skipped. `stop`: stop strings for the text after the reasoning. `on_truncation`: the response
    format's setting; "close" lets the engine complete a truncated value. `confidence`: whether to return
    ConfidentValues.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        on_truncation: str,
        schema: object,
        confidence: bool = False,
    ):
        self._text = Stops(stop, closes=on_truncation == "close").stream(tokenizer)
        self._schema, self._confidence = schema, confidence
        self._partial = PartialJson()
        self._unopened: list[int] | None = []  # the tokens so far; None after the end of the reasoning

    def push(self, output: RequestOutput) -> list[Any]:
        """Return a list with the partial value, or [] if `output` does not change the value.

        The last output gives a list with the whole value, decoded to the schema's type.

        Raises RequestFailed if the request failed or its answer was truncated.
        """
        if output.completion is not None:
            return [decode_answer(require_success(output.completion), self._schema, self._confidence)]
        token_ids = self._after_reasoning(output)
        changed = self._partial.push(self._text.push(token_ids))
        if not changed:
            return []
        value = self._partial.value()
        return [ConfidentValue(value, None) if self._confidence else value]

    def _after_reasoning(self, output: RequestOutput) -> list[int]:
        """Return the output's tokens after the reasoning."""
        if self._unopened is None or not output.after:
            return output.token_ids
        seen = len(self._unopened)
        self._unopened += output.token_ids
        end = find_end(self._unopened, output.after, max(0, seen - len(output.after) + 1))
        if end is None:
            return []
        rest, self._unopened = self._unopened[end:], None
        return rest

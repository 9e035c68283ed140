"""Parses a JSON answer while the model writes it, and returns the value so far."""

from typing import Any

from mmengine.models.plugin import Tokenizer
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.request_output import RequestOutput, require_success
from mmengine.serve.text.response_format import decode_answer
from mmengine.structured_output.grammar_start import find_end
from mmengine.structured_output.partial_json import PartialJson


class JsonStream:
    """Turns a request's outputs into values of `schema`.

    Skips reasoning at the beginning and applies the stop strings `stop` to the rest. `on_truncation` comes
    from the response format: with "close" the engine completes a cut value.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], on_truncation: str, schema: object):
        self._text = Stops(stop, closes=on_truncation == "close").stream(tokenizer)
        self._schema = schema
        self._partial = PartialJson()
        self._unopened: list[int] | None = []  # tokens of reasoning; None after its end

    def push(self, output: RequestOutput) -> list[Any]:
        """Return [the value so far] if `output` changes it, else []. The last output gives [the decoded
        value].

        Raises RequestFailed if the request failed or its answer was cut.
        """
        if output.completion is not None:
            return [decode_answer(require_success(output.completion), self._schema)]
        token_ids = self._after_reasoning(output)
        changed = self._partial.push(self._text.push(token_ids))
        return [self._partial.value()] if changed else []

    def _after_reasoning(self, output: RequestOutput) -> list[int]:
        """Return the output's tokens that are not reasoning."""
        if self._unopened is None or not output.after:
            return output.token_ids
        seen = len(self._unopened)
        self._unopened += output.token_ids
        end = find_end(self._unopened, output.after, max(0, seen - len(output.after) + 1))
        if end is None:
            return []
        rest, self._unopened = self._unopened[end:], None
        return rest

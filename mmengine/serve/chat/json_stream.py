"""Answers in JSON as values while they arrive."""

from collections.abc import AsyncIterator, Callable, Iterator

from mmengine.models.plugin import Tokenizer
from mmengine.serve.batch.run_batch import BatchEngine, news_of
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.request_output import RequestOutput, succeeded
from mmengine.serve.text.response_format import decoded
from mmengine.structured_output.opening import end_of
from mmengine.structured_output.partial_json import JsonValue, PartialJson


class JsonStream:
    """What the news of one answer make known of its value. Reasoning before it is passed over, and in what
    comes then `stops` are looked for."""

    def __init__(self, tokenizer: Tokenizer, stops: Stops):
        self._text = stops.stream(tokenizer)
        self._partial = PartialJson()
        self._unopened: list[int] | None = []  # tokens of reasoning; None: it is over

    def push(self, output: RequestOutput) -> list[JsonValue]:
        """The value so far if `output` made more of it known, else nothing. The whole value is not told of
        here: whoever has the completion decodes that."""
        if output.completion is not None:
            return []
        token_ids = self._behind(output)
        changed = self._partial.push(self._text.push(token_ids))
        return [self._partial.value()] if changed else []

    def _behind(self, output: RequestOutput) -> list[int]:
        """The tokens of `output` that are not reasoning."""
        if self._unopened is None or not output.after:
            return output.token_ids
        seen = len(self._unopened)
        self._unopened += output.token_ids
        end = end_of(self._unopened, output.after, max(0, seen - len(output.after) + 1))
        if end is None:
            return []
        rest, self._unopened = self._unopened[end:], None
        return rest


def values_of(
    engine: BatchEngine, submit: Callable[[], str], stops: Stops, schema: object
) -> Iterator[JsonValue]:
    """The value of one request while it is written, and decoded at last. `submit` queues it."""
    engine.check_batchable()
    news = JsonStream(engine.processor.tokenizer, stops)
    with news_of(engine, submit()) as outputs:
        for output in outputs:
            yield from news.push(output)
            if output.completion is not None:
                yield decoded(succeeded(output.completion), schema)


async def values_in(
    stream: Stream, tokenizer: Tokenizer, stops: Stops, schema: object
) -> AsyncIterator[JsonValue]:
    """`values_of` for a stream that is open."""
    stream.texts.pieces = False
    news = JsonStream(tokenizer, stops)
    async for output in stream:
        for value in news.push(output):
            yield value
    assert stream.completion is not None, "a stream without an error ends with its completion"
    yield decoded(succeeded(stream.completion), schema)

"""AsyncEngine's methods that return completions, chat messages, and JSON values that match a schema."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Unpack

from mmengine.config import EngineConfig
from mmengine.models.plugin import Processor
from mmengine.request import SamplingParams
from mmengine.serve.chat.chunks import ChatChunk
from mmengine.serve.chat.completion import (
    ChatAnswer,
    ChatCompletion,
    ChatOptions,
    ChatRequest,
    final_completion,
)
from mmengine.serve.chat.json_stream import JsonStream
from mmengine.serve.prompt.options import SubmitOptions
from mmengine.serve.prompt.prompt import PromptInput
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.request_output import Completion, require_success
from mmengine.serve.text.response_format import decode_answer, json_format
from mmengine.structured_output.partial_json import JsonValue


class AsyncChatStream:
    """An async iterator over ChatChunks.

    Leaving `async with`, calling `aclose`, or dropping the iterator cancels the request.
    """

    def __init__(self, chat: ChatRequest, stream: Stream):
        self._chat, self._stream = chat, stream
        self._answer: ChatAnswer | None = None  # set when the request is accepted
        self._chunks: deque[ChatChunk] = deque()

    def __aiter__(self) -> "AsyncChatStream":
        return self

    async def __anext__(self) -> ChatChunk:
        while not self._chunks:
            await self._fetch()
        return self._chunks.popleft()

    async def _fetch(self) -> None:
        """Wait for outputs and add their chunks. Raises StopAsyncIteration at the end."""
        stream = self._stream
        if self._answer is None:
            if stream.is_over:  # closed before its first chunk
                raise StopAsyncIteration
            await stream.accepted()
            self._answer = self._chat.begin(
                stream.request_id, stream.sampling, stream.reasoning, stream.grammar
            )
            self._chunks += self._answer.first()
            return
        outputs = await stream.next_outputs()
        if not outputs:
            self._answer.finish()
            raise StopAsyncIteration
        for output in outputs:
            self._chunks += self._answer.take(output)

    async def get_final_completion(self) -> ChatCompletion:
        """Wait for the complete answer, and return the same completion as `chat`. Raises RequestFailed if the
        stream was closed before its end.
        """
        async for _ in self:
            pass
        return final_completion(self._answer)

    async def aclose(self) -> None:
        """Cancel a running request and end the iterator."""
        self._chunks.clear()
        await self._stream.aclose()

    async def __aenter__(self) -> "AsyncChatStream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class AsyncAnswers(ABC):
    """Adds `generate`, `chat` and the JSON methods to an engine that has the method `stream`."""

    config: EngineConfig

    @property
    @abstractmethod
    def processor(self) -> Processor: ...

    @abstractmethod
    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream: ...

    async def chat(
        self, messages: PromptInput, *, sampling: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> ChatCompletion:
        """Return the same completion as `Engine.chat`. Other requests may run concurrently."""
        async with self.stream_chat(messages, sampling=sampling, **options) as stream:
            return await stream.get_final_completion()

    def stream_chat(
        self, messages: PromptInput, *, sampling: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncChatStream:
        """Return the same chunks as `Engine.stream_chat`, for `async for`.

        Raises the same errors as `stream`.
        """
        chat = ChatRequest(messages, options, self.processor, self.config)
        return AsyncChatStream(chat, self.stream(chat.prompt, sampling, **chat.options))

    async def generate(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Completion:
        """Return the complete answer.

        Raises the same errors as `stream`, and RequestFailed after a cancellation.
        """
        async with self.stream(prompt, sampling, **options) as stream:
            return require_success(await stream.completed())

    async def generate_json(
        self,
        messages: PromptInput,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        confidence: bool = False,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Any:
        """Return the same value as `Engine.generate_json`. Takes the same `options` as `generate`."""
        form = json_format(schema, sampling, options, reasoning, on_truncation, confidence)
        options["response_format"] = form
        return decode_answer(await self.generate(messages, sampling, **options), schema, confidence)

    async def stream_json(
        self,
        messages: PromptInput,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        confidence: bool = False,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> AsyncIterator[JsonValue]:
        """Yield the same values as `Engine.stream_json`. Other requests may run concurrently."""
        form = json_format(schema, sampling, options, reasoning, on_truncation, confidence)
        options["response_format"] = form
        async with self.stream(messages, sampling, **options) as stream:
            stream.texts.pieces = False
            stop, tokenizer = stream.sampling.stop, self.processor.tokenizer
            values = JsonStream(tokenizer, stop, on_truncation, schema, confidence)
            async for output in stream:
                for value in values.push(output):
                    yield value

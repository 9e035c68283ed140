"""What an AsyncEngine makes of its streams: whole answers, values of schemas, messages of a conversation."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, Unpack

from mmengine.config import EngineConfig
from mmengine.models.plugin import Processor
from mmengine.request import SamplingParams
from mmengine.serve.chat.completion import ChatAsked, ChatCompletion
from mmengine.serve.chat.json_stream import values_in
from mmengine.serve.chat.stream import AsyncChatStream
from mmengine.serve.prompt.options import SubmitOptions
from mmengine.serve.prompt.prompt import Prompted
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.request_output import Completion, succeeded
from mmengine.serve.text.response_format import decoded, json_format
from mmengine.structured_output.partial_json import JsonValue


class AsyncForms(Protocol):
    """Part of AsyncEngine."""

    config: EngineConfig

    @property
    def processor(self) -> Processor: ...

    def stream(
        self,
        prompt: Prompted,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Stream: ...

    async def chat(
        self,
        messages: Prompted,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> ChatCompletion:
        """What `Engine.chat` gives, beside whatever else runs."""
        chat = ChatAsked(messages, tools, tool_choice, parallel_tool_calls, self.processor, self.config)
        async with self._streamed(chat, sampling, options) as stream:
            return await stream.get_final_completion()

    def stream_chat(
        self,
        messages: Prompted,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> AsyncChatStream:
        """What `Engine.stream_chat` gives, beside whatever else runs: to be iterated with `async for`. It
        raises here what `stream` raises."""
        chat = ChatAsked(messages, tools, tool_choice, parallel_tool_calls, self.processor, self.config)
        return self._streamed(chat, sampling, options)

    def _streamed(
        self, chat: ChatAsked, sampling: SamplingParams | None, options: SubmitOptions
    ) -> AsyncChatStream:
        return AsyncChatStream(chat, self.stream(chat.prompt, sampling, **chat.options(options)))

    async def generate(
        self,
        prompt: Prompted,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Completion:
        """The whole answer. Raises what `stream` raises, and RequestFailed when it was given up."""
        async with self.stream(prompt, sampling, **options) as stream:
            stream.texts.pieces = False
            async for _ in stream:
                pass
        assert stream.completion is not None, "a stream without an error ends with its completion"
        return succeeded(stream.completion)

    async def generate_json(
        self,
        messages: Prompted,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Any:
        """What `Engine.generate_json` gives; `options` are those of `generate`."""
        options["response_format"] = json_format(schema, sampling, options, reasoning, on_truncation)
        return decoded(await self.generate(messages, sampling, **options), schema)

    async def stream_json(
        self,
        messages: Prompted,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> AsyncIterator[JsonValue]:
        """What `Engine.stream_json` yields, beside whatever else runs."""
        options["response_format"] = json_format(schema, sampling, options, reasoning, on_truncation)
        async with self.stream(messages, sampling, **options) as stream:
            stops = Stops(stream.sampling.stop, closes=on_truncation == "close")
            async for value in values_in(stream, self.processor.tokenizer, stops, schema):
                yield value

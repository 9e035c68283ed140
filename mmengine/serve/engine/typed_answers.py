"""Engine's methods for completions, chat messages and JSON values."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Unpack

from mmengine.config import EngineConfig
from mmengine.models.box_unit import Box, BoxUnit
from mmengine.models.plugin import Prepared, Processor
from mmengine.request import SamplingParams
from mmengine.serve.batch.run_batch import Job, Result
from mmengine.serve.chat.chunks import ChatChunk
from mmengine.serve.chat.completion import (
    ChatAnswer,
    ChatCompletion,
    ChatOptions,
    ChatRequest,
    final_completion,
)
from mmengine.serve.chat.json_stream import JsonStream
from mmengine.serve.engine.boxes import ImageSource, answer_boxes, box_unit_of
from mmengine.serve.prompt.options import GENERATE, GenerateOptions, Options, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import PromptInput, prompts_of
from mmengine.serve.prompt.prompt_media import PromptMedia
from mmengine.serve.text.reasoning import Reasoning
from mmengine.serve.text.request_output import Completion, RequestOutput, answer_to_prompt
from mmengine.serve.text.response_format import decode_answer, json_format, response_format_of
from mmengine.structured_output.partial_json import JsonValue

if TYPE_CHECKING:
    from mmengine.build import Built


class ChatStream:
    """An iterator over ChatChunks. Reading a chunk steps the engine.

    Leaving `with`, calling `close`, or dropping the iterator cancels an unfinished request. `chat`'s errors
    are raised while chunks are read.
    """

    def __init__(self, chunks: Generator[ChatChunk, None, ChatAnswer]):
        self._chunks = chunks
        self._answer: ChatAnswer | None = None

    def __iter__(self) -> "ChatStream":
        return self

    def __next__(self) -> ChatChunk:
        try:
            return next(self._chunks)
        except StopIteration as end:
            self._answer = self._answer or end.value
            raise

    def get_final_completion(self) -> ChatCompletion:
        """Read all chunks, and return the same completion as `chat`.

        Raises RequestFailed if the stream was closed before its end.
        """
        for _ in self:
            pass
        return final_completion(self._answer)

    def close(self) -> None:
        """Cancel a running request and end the iterator."""
        self._chunks.close()

    def __enter__(self) -> "ChatStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TypedAnswers(ABC):
    """Adds `generate`, `chat` and the JSON methods to Engine.

    These methods step the engine until the answers are complete.
    """

    config: EngineConfig
    processor: Processor
    reasoning: Reasoning
    built: "Built"

    @abstractmethod
    def check_batchable(self) -> None: ...

    @abstractmethod
    def submit(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[SubmitOptions],
    ) -> str: ...

    @abstractmethod
    def submit_prepared(self, prepared: Prepared, options: Options, *, stream: bool = True) -> str: ...

    @abstractmethod
    def outputs_of(self, request_id: str) -> AbstractContextManager[Iterator[RequestOutput]]: ...

    @abstractmethod
    def run_batch(self, jobs: Iterable[Job]) -> Iterator[Result]: ...

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Run all prompts in continuous batches, and return the answers in the prompts' order.

        A string, a Prompt or a message list is a single prompt, with a single answer in the list. The options
        are `submit`'s, without `request_id` and `deadline_s`. If a prompt is refused or fails, the first
        error is raised after all prompts have ended.
        """
        form = response_format_of(options)
        request_options = form.added_to(make_options(sampling, options, GENERATE))
        answers = dict(self.run_batch((prompt, request_options) for prompt in prompts_of(prompts)))
        return [answer_to_prompt(answers[index], index, len(answers) > 1) for index in sorted(answers)]

    def chat(
        self, messages: PromptInput, *, sampling: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> ChatCompletion:
        """Return the answer to a conversation as a message, as OpenAI's chat API does.

        Tool calls and reasoning are separate fields in the message. `tools`, `tool_choice` and
        `parallel_tool_calls` are OpenAI's options. The other options are `submit`'s. `response_format`
        applies only to an answer without tool calls. A stop string never ends a tool call.

        To continue the conversation, append the message's `as_json` to `messages`. Then append each tool's
        result as a message with the role `tool` and the call's `tool_call_id`. No other request may run
        during this call. Raises `generate`'s errors.
        """
        return self._chat(messages, sampling, options, stream=False).get_final_completion()

    def stream_chat(
        self, messages: PromptInput, *, sampling: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> ChatStream:
        """Return an iterator over the answer in OpenAI's stream chunks.

        The arguments are `chat`'s. This call raises InvalidRequest for invalid options. `chat`'s other errors
        are raised while chunks are read. No other request may run until the iterator ends. Closing the
        iterator cancels the request.
        """
        return self._chat(messages, sampling, options, stream=True)

    def _chat(
        self, messages: PromptInput, sampling: SamplingParams | None, options: ChatOptions, *, stream: bool
    ) -> ChatStream:
        chat = ChatRequest(messages, options, self.processor, self.config)
        return ChatStream(self._chunks(chat, sampling, stream))

    def _chunks(
        self, chat: ChatRequest, sampling: SamplingParams | None, stream: bool
    ) -> Generator[ChatChunk, None, ChatAnswer]:
        """Yield the answer's chunks. No other code may step the engine until the last chunk."""
        self.check_batchable()
        options = response_format_of(chat.options).added_to(make_options(sampling, chat.options))
        options.check()
        with PromptMedia(chat.prompt) as media:
            prepared = media.prompt().prepare(self.processor, options)
        reasoning = self.reasoning.tokens(options, prepared.prompt_token_ids)
        request_id = self.submit_prepared(prepared, options, stream=stream)
        with self.outputs_of(request_id) as outputs:
            answer = chat.begin(request_id, options.sampling, reasoning, options.grammar)
            yield from answer.first()
            for output in outputs:
                yield from answer.take(output)
        answer.finish()
        return answer

    def generate_json(
        self,
        messages: PromptInput,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        confidence: bool = False,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Return the answer to a prompt as a value that matches `schema`.

        `schema` is a JSON schema as a dict, or a Python type. For a type such as a dataclass, an instance is
        returned. The package structured_output.types lists the supported types. `reasoning` says whether the
        model reasons before the value; with None, the prompt decides. `options` are `generate`'s. Raises
        `generate`'s errors, and RequestFailed if the answer was truncated. `on_truncation="close"` completes
        the value within the token budget instead. With `confidence`, returns a ConfidentValue: the value and
        each field's confidence by JSON pointer.
        """
        form = json_format(schema, sampling, options, reasoning, on_truncation, confidence)
        options["response_format"] = form
        return decode_answer(self.generate([messages], sampling, **options)[0], schema, confidence)

    def boxes(self, value: object, schema: object, image: ImageSource) -> dict[str, Box]:
        """Return the boxes in an answer about an image, by JSON pointer, in the image file's pixels.

        A box is the value for a key `bbox_2d`, or for a schema with `"x-mmengine-box": true`. `value` has
        JSON types. Coordinates refer to the image before resizing and EXIF rotation. `Box.problem` says why a
        value is not a box in the image. Raises InvalidRequest if the plugin does not declare a box format.
        """
        return answer_boxes(value, schema, image, self.box_unit(), self.processor)

    def box_unit(self) -> BoxUnit:
        """Return the model's box format. Raises InvalidRequest if the plugin does not declare a format."""
        return box_unit_of(self.built.folder, self.built.plugin)

    def stream_json(
        self,
        messages: PromptInput,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        confidence: bool = False,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Iterator[JsonValue]:
        """Yield growing partial values during generation, and `generate_json`'s result last.

        A partial value has JSON types (a dict for an object). Each value extends the previous value, except
        that a repeated key outside the schema replaces its earlier value. Do not modify a value: later values
        share its objects. No other request may run until the iterator ends. Closing the iterator cancels the
        request. `generate_json`'s errors are raised while values are read, not by this call. With
        `confidence`, each value is a ConfidentValue, and only the last value has confidences.
        """
        form = json_format(schema, sampling, options, reasoning, on_truncation, confidence)
        options["response_format"] = form
        stop = make_options(sampling, options).sampling.stop
        self.check_batchable()
        values = JsonStream(self.processor.tokenizer, stop, on_truncation, schema, confidence)
        with self.outputs_of(self.submit(messages, sampling, **options)) as outputs:
            for output in outputs:
                yield from values.push(output)

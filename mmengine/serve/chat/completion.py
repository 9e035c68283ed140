"""Builds OpenAI-style chat completions, whose messages may have tool calls and reasoning.

The server and `Engine.chat` share this module, so the same tokens give the same answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from mmengine.config import EngineConfig
from mmengine.core.executor import PromptLogprobs
from mmengine.errors import FIELD, InvalidRequest, RequestFailed
from mmengine.events.call_ids import call_id
from mmengine.models.box_unit import Box
from mmengine.models.plugin import Processor
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.chat.chunks import BEGINNING, ChatChunk, ChunkChoice, chunks_of
from mmengine.serve.prompt.chat_messages import for_template
from mmengine.serve.prompt.options import SubmitOptions
from mmengine.serve.prompt.prompt import Prompt, PromptInput
from mmengine.serve.prompt.tools import NO_TEMPLATE, ToolCallSpec, ToolSelection, parse_tools
from mmengine.serve.text.choice_deltas import ArgumentError, ChoiceDeltas, Delta, Entry
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import Completion, RequestOutput, require_success
from mmengine.structured_output.field_confidence.fields import FieldConfidence
from mmengine.structured_output.json_schema.vocabulary.notes import Note


class FunctionCall(msgspec.Struct, frozen=True):
    """A function that the model calls: its name and arguments.

    `arguments` is a JSON object as text: the model's own text if the model writes calls as JSON.
    """

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call. `id` is derived from the request id, the choice's index and the call's index.

    The caller's message with the tool's result must have this id as `tool_call_id`.
    """

    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The message that the model generated.

    `content` is None if the message has tool calls and no text. `field_confidence` maps JSON pointers to the
    fields' confidences if the response format asks for them.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] | None = None
    reasoning_content: str | None = None
    field_confidence: dict[str, FieldConfidence] | None = None

    def as_json(self) -> dict[str, object]:
        """Return the message as a dict that can be appended to `messages` for the next call."""
        said = msgspec.structs.replace(self, field_confidence=None)
        return {"role": "assistant", **msgspec.json.decode(msgspec.json.encode(said))}


class ChatChoice(msgspec.Struct, frozen=True):
    """A single answer to the conversation.

    `finish_reason` is "stop" or "length", or "tool_calls" if the answer has calls and tool_choice is auto or
    required. `stop_reason` is the stop string or token that ended the answer. `argument_errors` lists invalid
    arguments for tools without an enforced schema.
    """

    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[Entry, ...] | None = None
    argument_errors: tuple[ArgumentError, ...] = ()


class ChatCompletion(msgspec.Struct, frozen=True):
    """The response to a chat call: `choices` has one or more answers to the conversation.

    `usage` has token counts under OpenAI's names. `notes` has remarks about the response format and the
    tools, for example about a schema that is not enforced.
    """

    request_id: str
    choices: tuple[ChatChoice, ...]
    usage: dict[str, object]
    notes: tuple[Note, ...] = ()

    @property
    def message(self) -> ChatMessage:
        """The first answer's message."""
        return self.choices[0].message

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


@dataclass(slots=True)
class AccumulatedChoice:
    """Collects a choice's deltas and builds the choice's message from them."""

    index: int
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    markers: list[int] = field(default_factory=list)  # as in Delta, but as indices into `logprobs`
    content_logprobs: list[Entry] = field(default_factory=list)  # logprobs of the content tokens
    finish_reason: str = ""
    stop_reason: str | int | None = None
    scores: PromptLogprobs | None = None  # the prompt's logprobs
    names: list[str] = field(default_factory=list)  # names of called functions
    arguments: list[list[str]] = field(default_factory=list)
    argument_errors: tuple[ArgumentError, ...] = ()
    field_confidence: dict[str, FieldConfidence] | None = None
    boxes: dict[str, Box] | None = None

    def add(
        self, delta: Delta, finish_reason: str | None = None, stop_reason: str | int | None = None
    ) -> None:
        """Add a delta. The last delta comes with `finish_reason` and `stop_reason`."""
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if delta.content:
            self.content.append(delta.content)
            self.content_logprobs.extend(delta.logprobs)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.markers.extend(len(self.logprobs) + place for place in delta.markers)
        self.logprobs.extend(delta.logprobs)
        self.argument_errors += delta.argument_errors
        if delta.field_confidence is not None:
            self.field_confidence = delta.field_confidence
        if delta.boxes is not None:
            self.boxes = delta.boxes
        if delta.call is None:
            return
        if delta.call.name:
            self.names.append(delta.call.name)
            self.arguments.append([])
        if delta.call.arguments:
            self.arguments[delta.call.number].append(delta.call.arguments)

    def message(self, request_id: str) -> ChatMessage:
        calls = tuple(
            ToolCall(call_id(request_id, self.index, n), FunctionCall(name, "".join(self.arguments[n])))
            for n, name in enumerate(self.names)
        )
        content = "".join(self.content)
        return ChatMessage(
            content if content or not calls else None,
            calls or None,
            "".join(self.reasoning) if self.reasoning else None,
            self.field_confidence,
        )


class ChatOptions(SubmitOptions, total=False):
    """Options for `chat`: the options for `submit`, and OpenAI's options for tools."""

    tools: Sequence[Mapping[str, object]] | None
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None


class ChatRequest:
    """A call to `chat` with checked arguments. `prompt` includes the tools. `options`: the options for
    `submit`.

    Raises InvalidRequest.
    """

    def __init__(self, prompt: PromptInput, options: ChatOptions, processor: Processor, config: EngineConfig):
        tools = parse_tools(
            options.pop("tools", None),
            options.pop("tool_choice", None),
            options.pop("parallel_tool_calls", None),
        )
        markers = config.reasoning_start, config.reasoning_end
        self.prompt, calls = with_tools(Prompt.of(prompt), tools, processor, markers)
        self.options: SubmitOptions = options
        if calls is not None:
            self.options["calls"] = calls
        self._tokenizer = processor.tokenizer

    def begin(
        self,
        request_id: str,
        sampling: SamplingParams,
        reasoning: ReasoningTokens,
        grammar: GrammarRequest | None,
    ) -> "ChatAnswer":
        """Return a ChatAnswer for this call after the engine has accepted the request."""
        return ChatAnswer(
            request_id,
            [ChoiceDeltas(self._tokenizer, sampling, reasoning, grammar) for _ in range(sampling.n)],
        )


class ChatAnswer:
    """Turns a request's outputs into stream chunks. `finish` sets `completion`, the whole answer."""

    def __init__(self, request_id: str, deltas: list[ChoiceDeltas]):
        self._request_id, self._deltas = request_id, deltas
        self.completion: ChatCompletion | None = None
        self._engine_completion: Completion | None = None
        self._whole = [AccumulatedChoice(index) for index in range(len(deltas))]

    def first(self) -> Iterator[ChatChunk]:
        """Yield the first chunks, which contain only each choice's role."""
        for index in range(len(self._deltas)):
            yield ChatChunk(self._request_id, (ChunkChoice(index, BEGINNING),))

    def take(self, output: RequestOutput) -> Iterator[ChatChunk]:
        """Yield the chunks for `output`."""
        for delta in self._deltas[output.index].take(output):
            self._whole[output.index].add(*delta)
            yield from chunks_of(self._request_id, output.index, delta)
        self._engine_completion = output.completion or self._engine_completion

    def finish(self) -> None:
        """Set `completion` after the last output. Raises RequestFailed if the request failed."""
        if self._engine_completion is not None:
            self.completion = self._completed(require_success(self._engine_completion))

    def _completed(self, answer: Completion) -> ChatCompletion:
        choices = tuple(
            ChatChoice(
                each.index,
                each.message(self._request_id),
                each.finish_reason,
                each.stop_reason,
                tuple(each.logprobs) if answer.choices[each.index].logprobs is not None else None,
                each.argument_errors,
            )
            for each in self._whole
        )
        reasoning = sum(each.num_reasoning_tokens for each in self._deltas)
        usage = answer.usage
        details = usage.get("completion_tokens_details", {})
        assert isinstance(details, dict)
        usage["completion_tokens_details"] = {**details, "reasoning_tokens": reasoning}
        return ChatCompletion(self._request_id, choices, usage, answer.notes)


def final_completion(answer: ChatAnswer | None) -> ChatCompletion:
    """Return the whole answer. Raises RequestFailed if the answer's stream was closed before the end."""
    if answer is None or answer.completion is None:
        raise RequestFailed("the stream was closed before its answer was complete")
    return answer.completion


def with_tools(
    prompt: Prompt, selection: ToolSelection | None, processor: Processor, markers: tuple[str, str]
) -> tuple[Prompt, ToolCallSpec | None]:
    """Return the prompt with the tools as template options, and the tool call format or None.

    `markers` are the strings that begin and end the model's reasoning. Raises InvalidRequest.
    """
    if prompt.messages is not None and (messages := for_template(prompt.messages)) is not prompt.messages:
        prompt = replace(prompt, messages=messages)
    if selection is None:
        return prompt, None
    if prompt.messages is None:
        raise InvalidRequest(
            f"{FIELD} need messages, into which the chat template writes them", path=("tools",)
        )
    form = processor.call_format(prompt.template_options)
    if form is None:
        raise InvalidRequest(NO_TEMPLATE, path=("tools",))
    template = {**(prompt.template_options or {}), "tools": list(selection.shown)}
    calls = ToolCallSpec(selection, form, markers if all(markers) else None)
    return replace(prompt, template_options=template), calls

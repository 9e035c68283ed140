"""What an Engine makes of answers: values of schemas, and messages of a conversation."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Unpack

from mmengine.request import SamplingParams
from mmengine.serve.batch.run_batch import BatchEngine, news_of
from mmengine.serve.chat.chunks import ChatChunk
from mmengine.serve.chat.completion import ChatAsked, ChatCompletion
from mmengine.serve.chat.json_stream import values_of
from mmengine.serve.chat.stream import ChatStream
from mmengine.serve.engine.session import Session
from mmengine.serve.prompt.options import GenerateOptions, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompted
from mmengine.serve.requests.sessions import IDLE_S, Sessions, SessionSettings
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.reasoning import Reasoning
from mmengine.serve.text.request_output import Completion
from mmengine.serve.text.response_format import decoded, json_format, response_format_of
from mmengine.structured_output.partial_json import JsonValue


class EngineForms(BatchEngine, Protocol):
    """Part of Engine."""

    reasoning: Reasoning
    sessions: Sessions

    def submit(
        self,
        prompt: Prompted,
        sampling: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[SubmitOptions],
    ) -> str: ...

    def generate(
        self,
        prompts: Sequence[Prompted],
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Prompted,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> ChatCompletion:
        """The answer to a conversation as OpenAI's chat API has it: a message, with calls of `tools` and
        reasoning apart. `tools`, `tool_choice` and `parallel_tool_calls` are OpenAI's; `options` are those
        of `submit`, `response_format` among them: that of an answer without calls. A stop string beside tools
        ends the text, never a call. `as_json` of the message, and what each tool said (a message of the role
        tool, with its `tool_call_id`), go behind `messages` in the next call. Nothing else is to run
        meanwhile. Raises what `generate` raises."""
        chat = ChatAsked(messages, tools, tool_choice, parallel_tool_calls, self.processor, self.config)
        return ChatStream(self._chunks(chat, sampling, options, stream=False)).get_final_completion()

    def stream_chat(
        self,
        messages: Prompted,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> ChatStream:
        """The answer of `chat` while it is written: an iterator of chunks in OpenAI's shape, those that the
        server writes as events, with `get_final_completion` for the whole. Nothing else is to run meanwhile.
        To close it is to cancel."""
        chat = ChatAsked(messages, tools, tool_choice, parallel_tool_calls, self.processor, self.config)
        return ChatStream(self._chunks(chat, sampling, options, stream=True))

    def session(
        self,
        session_id: str = "",
        *,
        system: str = "",
        length: int = 0,
        keep: int = 0,
        idle_s: float = IDLE_S,
        cache_salt: str = "",
        adapter: str = "",
        media_options: Mapping[str, object] | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> Session:
        """A request that grows (docs/how-to/sessions.md): what is appended is computed
        as it comes, and asked about.
        `length`: tokens that it may have (0: max_model_len); beyond it a new chain begins with the anchor and
        the last that `keep` tokens hold (0: half). `idle_s`: it is closed when nobody asks for so long; 0:
        never. `adapter`: the name of the one that computes all of it. An id that is open is gone on with,
        such as one of the process before. Raises InvalidRequest, QueueFull."""
        if session_id not in self.sessions.names():
            settings = SessionSettings(
                system=system,
                length=length,
                keep=keep,
                cache_salt=cache_salt,
                adapter=adapter,
                template_options=dict(template_options or {}),
            )
            session_id = self.sessions.open(session_id, settings, idle_s)
        return Session(self, session_id, media_options)

    def _chunks(
        self, chat: ChatAsked, sampling: SamplingParams | None, options: SubmitOptions, stream: bool
    ) -> Generator[ChatChunk, None, ChatCompletion]:
        """`stream`: somebody takes them one by one, and must not let others step meanwhile."""
        self.check_batchable()
        options = chat.options(options)
        asked = response_format_of(options).added_to(make_options(sampling, options))
        asked.check()
        prepared = chat.prompt.prepare(self.processor, asked.cache_salt)
        reasoning = self.reasoning.tokens(asked, prepared.prompt_token_ids)
        request_id = self.submit_prepared(prepared, asked, stream=stream)
        completion: Completion | None = None
        with news_of(self, request_id) as outputs:
            answer = chat.begin(request_id, asked.sampling, reasoning, asked.grammar)
            yield from answer.first()
            for output in outputs:
                completion = output.completion or completion
                yield from answer.take(output)
        assert completion is not None, "a request ends with its completion"
        return answer.completion(completion)

    def generate_json(
        self,
        messages: Prompted,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """The answer to one prompt as the value that `schema` describes: a JSON schema as a dict, or a type
        (list[Model], a dataclass, whatever types.py knows), of which an instance comes back. `reasoning`:
        whether the model reasons first; None: where the prompt makes it. `options` are those of
        `generate`. Raises what that raises, and RequestFailed when the answer was cut, which `on_truncation`
        "close" prevents: it is then completed within its budget."""
        options["response_format"] = json_format(schema, sampling, options, reasoning, on_truncation)
        return decoded(self.generate([messages], sampling, **options)[0], schema)

    def stream_json(
        self,
        messages: Prompted,
        schema: object,
        *,
        reasoning: bool | None = None,
        on_truncation: str = "length",
        sampling: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Iterator[JsonValue]:
        """The value of `generate_json` while it is written: what is known of it as JSON has it (a dict for an
        object), again whenever that is more, and at last the value that `generate_json` gives. No value
        contradicts the one before, but where a key that the schema does not name comes twice. Later values
        share the parts that are complete: leave those as they are. Nothing else is to run meanwhile. To close
        the iterator is to cancel. The first value is where it raises what `generate_json` raises."""
        options["response_format"] = json_format(schema, sampling, options, reasoning, on_truncation)
        stops = Stops(make_options(sampling, options).sampling.stop, closes=on_truncation == "close")
        yield from values_of(self, partial(self.submit, messages, sampling, **options), stops, schema)

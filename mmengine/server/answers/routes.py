"""/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.errors import FIELD, ErrorCode, FieldPath
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.prompt import request_ids
from mmengine.serve.prompt.tools import ToolLimits
from mmengine.server.calls.call_identity import ITS_ID, Caller, identified, tries_again
from mmengine.server.calls.call_registry import CallRegistry, key_in_use
from mmengine.server.calls.stored_responses import StoredResponses
from mmengine.server.chat.chat_frames import ChatFrames, Frames
from mmengine.server.chat.chat_reader import ChatReader, Pixels, Tools
from mmengine.server.chat.completion_frames import CompletionFrames
from mmengine.server.chat.completion_reader import CompletionReader
from mmengine.server.chat.parsed_request import Asked, Defaults, Form
from mmengine.server.chat.response_builder import Answering
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.chat.uploaded_images import UploadedImages
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.body_fields import dropped_header
from mmengine.server.http.body_reader import Held
from mmengine.server.http.errors import ApiError, ClientLeft, api_error, shutting_down
from mmengine.server.http.field_names import FieldNames
from mmengine.server.http.metrics import HttpMetrics
from mmengine.server.http.model_names import ModelNames
from mmengine.server.http.parser_threads import Parsers
from mmengine.server.messages.frames import MessagesFrames
from mmengine.server.messages.reading import MessagesReader, check_version
from mmengine.server.responses.frames import ResponsesFrames
from mmengine.server.responses.reading import IN_BATCH, GoingOn, ResponsesReader, previous_of
from mmengine.server.responses.routes import ResponseRoutes
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Keep
from mmengine.server.transport.sse import EventStream, unless_gone

if TYPE_CHECKING:  # OpenTelemetry is an extra
    from mmengine.server.calls.tracing import Traced, Tracing

MAX_ID_CHARS = 128
ID_HEADER = "x-request-id"
MESSAGE_ID_HEADER = "request-id"  # Anthropic's name of it
REQUEST_ID = "mmengine.request_id"  # in a scope: the id of its answer
UNENFORCED_HEADER = "x-mmengine-unenforced-tools"
_MAX_UNENFORCED_CHARS = 1000
_TRACED = "mmengine.traced"  # in a scope: the span of its call
LINE_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # that batches may ask
# The engine knows structured_outputs as grammar, and a grammar by its language.
_GRAMMAR_NAMES = FieldNames(
    (),
    (
        (("grammar", "lark"), ("structured_outputs", "grammar")),
        (("grammar", "gbnf"), ("structured_outputs", "grammar")),
        (("grammar",), ("structured_outputs",)),
    ),
)


class Reader(Protocol):
    def read(self, data: bytes, request_id: str) -> Asked: ...


# Gives, of a body's pieces, its room and its owner, what reads it where it goes on with what was said before.
_GoingOn = Callable[[list[bytes], Held, str], Awaitable[Reader]]


class AnswerRoutes:
    """`names`: by which calls ask for the model or an adapter. `keep`: what is kept beside the log."""

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServerSettings,
        names: ModelNames,
        metrics: HttpMetrics,
        admission: Admission,
        texts: TokenTexts,
        door: MediaFetcher | None = None,
        keep: Keep | None = None,
        tracing: "Tracing | None" = None,
    ):
        self._tracing = tracing
        self._engine, self._settings, self._names = engine, settings, names
        self._metrics, self._admission, self._texts = metrics, admission, texts
        self._processor = engine.processor
        self._new_id = request_ids()
        files = keep.files if keep is not None else None
        self.uploads = UploadedImages(files, settings.max_media_bytes, settings.max_media_urls)
        defaults = Defaults(self._processor.generation_defaults, settings.generation_config)
        ignores = settings.unknown_fields == "ignore"
        pixels = Pixels.of(settings.max_pixels, self._processor.max_image_pixels)
        self.reader = ChatReader(
            defaults,
            engine.config.max_model_len,
            settings.chat_template,
            pixels,
            self._tools(engine, settings),
            ignores,
            door,
            settings.max_messages,
            settings.max_schema_bytes,
        )
        self._completion_reader = CompletionReader(
            defaults,
            self._processor.tokenizer,
            settings.max_prompts,
            settings.max_pixels,
            ignores,
            settings.max_schema_bytes,
            self._processor.max_prompt_tokens,
        )
        kept = StoredResponses(keep.answers) if keep is not None else None
        self.calls = CallRegistry(engine, settings.reattach_s, kept)
        self._responses_reader = ResponsesReader(
            self.reader, ignore_unknown=ignores, is_kept=kept is not None
        )
        responses_of_lines = ResponsesReader(self.reader, ignore_unknown=ignores, unkept=IN_BATCH)
        self._line_readers: tuple[Reader, ...] = self.reader, self._completion_reader, responses_of_lines
        self.messages_reader = MessagesReader(
            self.reader, ignore_unknown=ignores, can_end_reasoning=engine.can_end_reasoning
        )
        self.parsers = Parsers()
        tokenizer = self._processor.tokenizer
        self.kept_responses: ResponseRoutes | None = None
        if kept is not None:
            self.kept_responses = ResponseRoutes(
                kept, self.calls, self.parsers, tokenizer, texts, self.stream_again
            )

    def _tools(self, engine: ServedEngine, settings: ServerSettings) -> Tools:
        limits = ToolLimits(settings.max_tools, settings.max_tool_bytes, settings.strict_tools)
        return Tools(self._processor, limits, (engine.config.reasoning_start, engine.config.reasoning_end))

    async def chat(self, request: Request) -> ASGIApp:
        return await self._answer(request, self.reader)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._answer(request, self._completion_reader)

    async def responses(self, request: Request) -> ASGIApp:
        return await self._answer(request, self._responses_reader, self._going_on)

    async def messages(self, request: Request) -> ASGIApp:
        check_version(request.headers.get("anthropic-version", ""))
        return await self._answer(request, self.messages_reader)

    async def _going_on(self, data: list[bytes], held: Held, owner: str) -> Reader:
        """What reads a response, which may go on with others: those take room, too. Raises ApiError."""
        previous = await self.parsers.run(held.num_bytes, lambda: previous_of(b"".join(data)))
        if self.kept_responses is None or previous is None:
            return self._responses_reader
        add = partial(self._admission.bodies.add_before, held)
        return GoingOn(self._responses_reader, *await self.kept_responses.before(owner, previous, add))

    def stream_again(self, answering: Answering, owner: str) -> ASGIApp:
        """The stream of a response that was created before."""
        try:
            self._admission.take(owner)
        except ApiError:
            answering.close()
            raise
        return self._event_stream(
            answering, answering.asked, partial(self._stream_ended, owner, answering, None)
        )

    def read_line(self, endpoint: str, data: bytes, name: str, owner: str) -> Asked:
        """What a line of a batch asks, of one of LINE_ENDPOINTS. `name`: of the request. On any thread.
        Raises ApiError."""
        reader = self._line_readers[LINE_ENDPOINTS.index(endpoint)]
        asked = self.named(reader.read(data, name), owner)
        if asked.stream:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"{FIELD} is not taken in a batch; leave it out", FieldPath("stream")
            )
        if asked.request_id != name:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} is not taken in a batch; custom_id names a line",
                FieldPath("request_id"),
            )
        return asked

    def frames_of(self, asked: Asked) -> Frames:
        """How the answer to a call is written."""
        name, envelope, texts = asked.request_id, asked.envelope, self._texts if asked.logprobs else None
        match envelope.api:
            case "chat":
                twice = self._settings.reasoning_fields == "both"
                return ChatFrames(name, envelope, texts, asked.usage_frames, names_reasoning_twice=twice)
            case "responses":
                return ResponsesFrames(name, envelope, texts)
            case "messages":
                return MessagesFrames(name, envelope)
        return CompletionFrames(name, envelope, texts, asked.usage_frames, asked.echoed, asked.sampling.n)

    async def _answer(self, request: Request, reader: Reader, going_on: _GoingOn | None = None) -> ASGIApp:
        owner = request.scope[OWNER]
        self._admission.take(owner)
        streams = False
        try:
            answer = await self._read_and_answer(request, reader, going_on)
            streams = isinstance(answer, EventStream)
            return answer
        except BaseException as error:
            if (traced := request.scope.get(_TRACED)) is not None:
                traced.failed(error)
            raise
        finally:
            if not streams:  # a stream gives it back when it ends
                self._admission.give(owner)

    async def _read_and_answer(self, request: Request, reader: Reader, going_on: _GoingOn | None) -> ASGIApp:
        owner = request.scope[OWNER]
        with self._admission.holding(owner) as held:
            data = await self._admission.bodies.read(request.scope, request.receive, held)
            self._metrics.body_bytes.inc(held.num_bytes)
            new_id = self._new_id()
            given = request.headers.get(ID_HEADER, "") or new_id
            if _is_id(given):
                request.scope[REQUEST_ID] = given  # in errors, unless the body has another one
            if going_on is not None:
                reader = await going_on(data, held, owner)
            asked = await self.parsers.run(held.num_bytes, partial(self._read, reader, data, given, request))
            data.clear()
            request.scope[REQUEST_ID] = asked.request_id
            traced = self._begin_span(request, asked)
            caller = Caller(asked.request_id != new_id, tries_again(request))
            fill = partial(self.uploads.fill, add=partial(self._admission.bodies.add, held))
            try:
                asked, sources = await self.calls.sources(asked, caller, fill)
            except Exception as error:
                raise self.told(error, asked) from error
            request.scope[REQUEST_ID] = asked.request_id  # as it was accepted first
            frames = self.frames_of(asked)
            answering = Answering(asked, frames, sources, self._processor.tokenizer)
            try:
                with unless_gone(request.scope):
                    await answering.open()
                    held.release()
                    if asked.stream:
                        await answering.first_news(self._settings.ping_s)
                        ended = partial(self._stream_ended, owner, answering, traced)
                        return self._event_stream(answering, asked, ended, traced)
                    if isinstance(frames, ResponsesFrames) and frames.is_background:
                        body = frames.response.of("queued")
                    else:
                        body = await answering.whole()
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and self._admission.is_draining:
                    raise self._left_behind(answering, asked) from None
                answering.close()
                told = self.told(error, asked)
                if told is error:
                    raise
                raise told from error
            answering.close()
        headers = _headers(asked, answering.unenforced, traced)
        if traced is not None:
            traced.answered(answering, "whole")
        return Response(body, media_type="application/json", headers=headers)

    def _begin_span(self, request: Request, asked: Asked) -> "Traced | None":
        if self._tracing is None:
            return None
        traced = request.scope[_TRACED] = self._tracing.begin(asked, len(asked.prompts))
        return traced

    def _read(self, reader: Reader, data: list[bytes], name: str, request: Request) -> Asked:
        """What is asked. `name`: of the request, unless the body has another one. On any thread."""
        body = b"".join(data)
        asked = self.named(reader.read(body, name), request.scope[OWNER])
        return msgspec.structs.replace(asked, envelope=identified(asked.envelope, request, body))

    def _left_behind(self, answering: Answering, asked: Asked) -> ApiError:
        """The server ends before the answer is there. Takes back the cancellation by which that is known."""
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        if answering.is_accepted:
            answering.leave()
            return self._admission.left_behind(asked.request_id, is_held=answering.is_held)
        answering.close()
        return shutting_down(self._admission.retry_later_s())

    def named(self, asked: Asked, owner: str) -> Asked:
        """With the model's name; another one is refused, and so is an id that no header could hold."""
        if not _is_id(asked.request_id):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} must have 1 to {MAX_ID_CHARS} printable ASCII characters without spaces",
                FieldPath("request_id"),
            )
        model, adapter = self._names.served(asked.envelope.model)
        envelope = msgspec.structs.replace(asked.envelope, model=model, owner=owner)
        return msgspec.structs.replace(asked, envelope=envelope, adapter=adapter)

    def told(self, error: BaseException, asked: Asked) -> BaseException:
        """An error of the engine, as its caller is told it; others as they are."""
        if not isinstance(error, Exception) or isinstance(error, ClientLeft):
            return error
        found = api_error(error, asked.params, self._admission.rate.retry_after_s())
        if found.code is ErrorCode.REQUEST_ID_IN_USE:  # the engine's text has the owner
            return key_in_use((asked.envelope.owner, ITS_ID, asked.request_id))
        found = _named_form(found, asked.form)
        return found if asked.field_names is None else found.renamed(asked.field_names.path)

    def _told_in_stream(self, error: Exception) -> ApiError:
        found = api_error(error)
        self._metrics.told(found)
        return found

    def id_of(self, request: Request) -> str:
        """Of a call, as its caller named it, or drawn."""
        given = request.headers.get(ID_HEADER, "") or self._new_id()
        if _is_id(given):
            request.scope[REQUEST_ID] = given
        return given

    def stream_of_session(self, answering: Answering, asked: Asked, then: Callable[[], None]) -> EventStream:
        """`then`: called when it is over."""

        def ended(how: str) -> None:
            then()
            self._metrics.stream_ended(how)

        return self._event_stream(answering, asked, ended)

    def _event_stream(
        self,
        answering: Answering,
        asked: Asked,
        ended: Callable[[str], None],
        traced: "Traced | None" = None,
    ) -> EventStream:
        self._metrics.streams.inc()
        settings = self._settings
        return EventStream(
            answering,
            answering.first(),
            _headers(asked, answering.unenforced, traced),
            ping_s=settings.ping_s,
            slow_reader_s=settings.slow_reader_s,
            max_backlog=settings.max_backlog,
            sent=self._metrics.sent,
            told=self._told_in_stream,
            ended=ended,
            shutting_down=partial(self._cut, asked.request_id, answering.is_held),
        )

    def _stream_ended(self, owner: str, answering: Answering, traced: "Traced | None", how: str) -> None:
        self._admission.give(owner)
        if traced is not None:
            traced.answered(answering, how)
        self._metrics.stream_ended(how)

    def _cut(self, request_id: str, is_held: bool) -> ApiError | None:
        if not self._admission.is_draining:
            return None
        return self._admission.left_behind(request_id, is_held=is_held)


def _is_id(name: str) -> bool:
    return 0 < len(name) <= MAX_ID_CHARS and name.isascii() and name.isprintable() and " " not in name


def _named_form(error: ApiError, form: Form) -> ApiError:
    """Return an error of the form that was asked for, by the names of the body."""
    if form.grammar is not None and error.path[:1] == ("grammar",):
        return error.at(_GRAMMAR_NAMES.path(error.path))
    if error.code is ErrorCode.INVALID_GRAMMAR and not error.path:
        return error.at(form.place)
    return error


def _headers(asked: Asked, unenforced: tuple[str, ...], traced: "Traced | None") -> dict[str, str]:
    headers = {ID_HEADER: asked.request_id}
    if asked.envelope.api == "messages":
        headers[MESSAGE_ID_HEADER] = asked.request_id
    if traced is not None:
        headers |= traced.headers
    if unenforced:
        headers[UNENFORCED_HEADER] = ", ".join(unenforced)[:_MAX_UNENFORCED_CHARS]
    return headers | dropped_header(asked.dropped)

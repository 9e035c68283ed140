"""Handlers for /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages: read the body, submit
the request to the engine, and send the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.prompt import request_ids
from mmengine.server.answers.event_streams import EventStreams
from mmengine.server.answers.headers import ID_HEADER, REQUEST_ID, answer_headers, is_request_id
from mmengine.server.answers.request_readers import Reader, RequestReaders
from mmengine.server.calls.call_identity import Caller, tries_again, with_identity
from mmengine.server.calls.call_registry import CallRegistry
from mmengine.server.calls.stored_responses import StoredResponses
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.body_reader import BodyReservation
from mmengine.server.http.errors import ApiError, shutdown_error
from mmengine.server.http.metrics import HttpMetrics
from mmengine.server.http.model_names import ModelNames
from mmengine.server.messages.reader import check_version
from mmengine.server.responses.frames import ResponsesFrames
from mmengine.server.responses.reader import ContinuationReader, previous_of
from mmengine.server.responses.routes import ResponseRoutes
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Storage
from mmengine.server.transport.sse import EventStream, unless_gone

if TYPE_CHECKING:  # OpenTelemetry is an extra.
    from mmengine.server.calls.tracing import CallSpan, Tracing

_SPAN = "mmengine.span"  # Key for the call's span in the ASGI scope.
# (A body's chunks, their memory reservation, the owner) -> the reader for the body.
_FindReader = Callable[[list[bytes], BodyReservation, str], Awaitable[Reader]]


def uncancel() -> None:
    """Undo a cancellation of the current task, so that the task can still send a response."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


class AnswerRoutes:
    """The routes that create answers.

    `names`: the names under which the model and its adapters are served. `storage`: uploaded files and stored
    responses; None for a server without a log.
    """

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServerSettings,
        names: ModelNames,
        metrics: HttpMetrics,
        admission: Admission,
        texts: TokenTexts,
        media_fetcher: MediaFetcher | None = None,
        storage: Storage | None = None,
        tracing: "Tracing | None" = None,
    ):
        self._settings, self._metrics, self._admission, self._tracing = settings, metrics, admission, tracing
        self._new_id, self._tokenizer = request_ids(), engine.processor.tokenizer
        self.readers = RequestReaders(engine, settings, names, admission, texts, media_fetcher, storage)
        self.streams = EventStreams(settings, metrics, admission)
        stored_responses = StoredResponses(storage.answers) if storage is not None else None
        self.calls = CallRegistry(engine, settings.reattach_s, stored_responses)
        self.stored_response_routes: ResponseRoutes | None = None
        if stored_responses is not None:
            self.stored_response_routes = ResponseRoutes(
                stored_responses,
                self.calls,
                self.readers.parser_threads,
                self._tokenizer,
                texts,
                self.streams.of_stored_response,
            )

    async def chat(self, request: Request) -> ASGIApp:
        return await self._answer(request, self.readers.chat)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._answer(request, self.readers.completions)

    async def responses(self, request: Request) -> ASGIApp:
        return await self._answer(request, self.readers.responses, self._find_reader)

    async def messages(self, request: Request) -> ASGIApp:
        check_version(request.headers.get("anthropic-version", ""))
        return await self._answer(request, self.readers.messages)

    def id_of(self, request: Request) -> str:
        """Return the call's request id: the value of the header `ID_HEADER`, or a new id if this header is
        missing.
        """
        given = request.headers.get(ID_HEADER, "") or self._new_id()
        if is_request_id(given):
            request.scope[REQUEST_ID] = given
        return given

    async def _find_reader(self, data: list[bytes], reservation: BodyReservation, owner: str) -> Reader:
        """Return the reader for a /v1/responses body. If the body continues stored responses, the reader has
        these responses.

        The stored responses count against `reservation`. Raises ApiError.
        """
        threads = self.readers.parser_threads
        previous = await threads.run(reservation.num_bytes, lambda: previous_of(b"".join(data)))
        if self.stored_response_routes is None or previous is None:
            return self.readers.responses
        add = partial(self._admission.bodies.add_before, reservation)
        items, media = await self.stored_response_routes.before(owner, previous, add)
        return ContinuationReader(self.readers.responses, items, media)

    async def _answer(
        self, request: Request, reader: Reader, find_reader: _FindReader | None = None
    ) -> ASGIApp:
        owner = request.scope[OWNER]
        self._admission.take(owner)
        streams = False
        try:
            answer = await self._read_and_answer(request, reader, find_reader)
            streams = isinstance(answer, EventStream)
            return answer
        except BaseException as error:
            if (span := request.scope.get(_SPAN)) is not None:
                span.record_error(error)
            raise
        finally:
            if not streams:  # A stream releases the call when it ends.
                self._admission.give(owner)

    async def _read_and_answer(
        self, request: Request, reader: Reader, find_reader: _FindReader | None
    ) -> ASGIApp:
        owner = request.scope[OWNER]
        with self._admission.reserve(owner) as reservation:
            data = await self._admission.bodies.read(request.scope, request.receive, reservation)
            self._metrics.body_bytes.inc(reservation.num_bytes)
            new_id = self._new_id()
            given = request.headers.get(ID_HEADER, "") or new_id
            if is_request_id(given):
                # Error responses contain this id, unless the body has a request_id.
                request.scope[REQUEST_ID] = given
            if find_reader is not None:
                reader = await find_reader(data, reservation, owner)
            parsed_request = await self.readers.parser_threads.run(
                reservation.num_bytes, partial(self._read, reader, data, given, request)
            )
            data.clear()
            request.scope[REQUEST_ID] = parsed_request.request_id
            span = self._begin_span(request, parsed_request)
            caller = Caller(parsed_request.request_id != new_id, tries_again(request))
            fill = partial(self.readers.media.fill, add=partial(self._admission.bodies.add, reservation))
            try:
                parsed_request, sources = await self.calls.sources(parsed_request, caller, fill)
            except Exception as error:
                raise self.readers.to_api_error(error, parsed_request) from error
            request.scope[REQUEST_ID] = parsed_request.request_id  # A repeated call gets the first call's id.
            frames = self.readers.frames_of(parsed_request)
            builder = ResponseBuilder(parsed_request, frames, sources, self._tokenizer)
            try:
                with unless_gone(request.scope):
                    await builder.open()
                    reservation.release()
                    if parsed_request.stream:
                        await builder.wait_for_output(self._settings.ping_s)
                        return self.streams.of_call(builder, parsed_request, owner, span)
                    if isinstance(frames, ResponsesFrames) and frames.is_background:
                        body = frames.response.of("queued")
                    else:
                        body = await builder.whole()
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and self._admission.is_draining:
                    raise self._interrupt(builder, parsed_request) from None
                stuck = self._admission.stuck_error(
                    parsed_request.request_id, can_reattach=builder.is_accepted and builder.can_reattach
                )
                builder.close()
                if isinstance(error, asyncio.CancelledError) and stuck is not None:
                    uncancel()
                    raise stuck from None
                converted = self.readers.to_api_error(error, parsed_request)
                if converted is error:
                    raise
                raise converted from error
            builder.close()
        headers = answer_headers(parsed_request, builder.unenforced, span)
        if span is not None:
            span.record_answer(builder, "whole")
        return Response(body, media_type="application/json", headers=headers)

    def _begin_span(self, request: Request, parsed_request: ParsedRequest) -> "CallSpan | None":
        if self._tracing is None:
            return None
        span = request.scope[_SPAN] = self._tracing.begin(parsed_request, len(parsed_request.prompts))
        return span

    def _read(self, reader: Reader, data: list[bytes], name: str, request: Request) -> ParsedRequest:
        """Read a body. `name` is the request id, unless the body has a request_id. Thread-safe."""
        body = b"".join(data)
        parsed_request = self.readers.read(reader, body, name, request.scope[OWNER])
        envelope = with_identity(parsed_request.envelope, request, body)
        return msgspec.structs.replace(parsed_request, envelope=envelope)

    def _interrupt(self, builder: ResponseBuilder, parsed_request: ParsedRequest) -> ApiError:
        """Return the error for a call that the server's shutdown interrupts, and undo the task's
        cancellation.

        The next process can continue a request that the engine has accepted. Any other request is cancelled.
        """
        uncancel()
        if builder.is_accepted:
            builder.leave()
            name = parsed_request.request_id
            return self._admission.interrupted_error(name, can_reattach=builder.can_reattach)
        builder.close()
        return shutdown_error(self._admission.retry_later_s())

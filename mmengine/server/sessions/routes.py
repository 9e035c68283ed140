"""Handlers for /v1/sessions. A session is a conversation to which calls append content and questions.

Frames and texts are prefilled when they arrive, and questions are answered as in chat. A session's calls run
in arrival order. A call gets status 409 if too many calls wait. A session belongs to the API key that opened
it; calls with another key get status 404. The log contains the whole session, so the session survives a
restart.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.errors import FIELD, ErrorCode, FieldPath, MMEngineError
from mmengine.processing.media.data_urls import is_data_url
from mmengine.serve.async_engine.sessions import AsyncSession
from mmengine.serve.requests.sessions import SessionFacts
from mmengine.serve.requests.submission import OTHER_ADAPTER
from mmengine.serve.stream.answer_record import AnswerRecord, AnswerSource, RecordReader
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.answers.headers import ID_HEADER
from mmengine.server.answers.routes import AnswerRoutes
from mmengine.server.chat.answer_boxes import refuse_session
from mmengine.server.chat.parsed_request import Json, ParsedRequest, item_options
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.chat.submission import log_request_id, submit_options
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.body_reader import BodyReservation
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.model_names import ModelNames
from mmengine.server.sessions.bodies import (
    SessionDeleted,
    SessionObjects,
    StoredSession,
    as_chat_body,
    content_as_chat_body,
    decode_frame,
    decode_session,
    object_of,
)
from mmengine.server.sessions.registry import SessionRegistry
from mmengine.server.sessions.repeated_calls import is_repeated, repeat_answer
from mmengine.server.settings import ServerSettings
from mmengine.server.transport.sse import unless_gone

T = TypeVar("T")


class SessionRoutes:
    """Handlers for /v1/sessions. `names`: the served model names. `answers`: parses bodies and renders
    answers as for chat.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        settings: ServerSettings,
        names: ModelNames,
        admission: Admission,
        answers: AnswerRoutes,
    ):
        self._sessions, self._engine, self._settings = sessions, sessions.engine, settings
        self._names, self._admission, self._answers = names, admission, answers

    # Handlers

    async def create(self, request: Request) -> ASGIApp:
        owner = request.scope[OWNER]
        async with self._call(request) as (data, reservation):
            body = await self._parsed(data, partial(decode_body, data, decode_session))
            model, adapter = self._names.resolve(body.model)
            anchor = None
            if body.anchor is not None:
                anchor = await self._parse_body(request, content_as_chat_body(body.anchor), "-")
                await self._fill(anchor, reservation)
            name = f"sess_{secrets.token_hex(12)}"
            media = item_options(body.mm_processor_kwargs, self._settings.max_pixels)
            kept = StoredSession(owner, int(time.time()), model, media)
            template_options = self._answers.readers.chat.template_options(body.chat_template_kwargs)
            async with self._sessions.opening(owner):
                session = await self._engine.session(
                    log_request_id(owner, name),
                    system=body.system,
                    length=body.length,
                    keep=body.keep,
                    idle_s=body.idle_s,
                    cache_salt=body.cache_salt or self._admission.salt_of(owner),
                    tenant=self._admission.tenant_of(owner),
                    adapter=adapter,
                    template_options=template_options,
                    media_options=self._sessions.media_options(kept),
                    envelope=msgspec.json.encode(kept),
                )
            self._sessions.add(session)
            if anchor is not None:
                try:
                    await session.append(_content(anchor), anchor=True)
                except BaseException:
                    await self._sessions.close(session)
                    raise
            return await self._told_of(session, name, None)

    async def list_sessions(self, request: Request) -> ASGIApp:
        owner = request.scope[OWNER]
        found = await self._sessions.of(owner)
        return _json(SessionObjects([object_of(each, _name(each, owner)) for each in found]))

    async def get(self, request: Request) -> ASGIApp:
        session, name, _ = await self._found(request)
        return _json(object_of(await session.facts(), name, frames_held=session.num_frames_held))

    async def delete(self, request: Request) -> ASGIApp:
        session, name, _ = await self._found(request)
        await self._sessions.close(session)
        return _json(SessionDeleted(name))

    async def append(self, request: Request) -> ASGIApp:
        async with self._call(request) as (data, reservation):
            session, name, _ = await self._found(request)
            chat, index = await self._parsed(data, partial(as_chat_body, data, asks=False))
            parsed_request, cached = await self._parse_body(request, chat, "-"), None
            async with session.turn() as facts:
                if not is_repeated(facts, index):
                    await self._fill(parsed_request, reservation)
                    cached = (await session.append_in_turn(facts, _content(parsed_request))).num_cached_tokens
            return await self._told_of(session, name, cached)

    async def frame(self, request: Request) -> ASGIApp:
        async with self._call(request) as (data, _):
            session, name, _ = await self._found(request)
            body = await self._parsed(data, partial(decode_body, data, decode_frame))
            image, cached = _picture(body.image), None
            async with session.turn() as facts:
                if not (is_repeated(facts, body.index) or session.has_frame(image, body.seconds, body.index)):
                    self._sessions.check_room(request.scope[OWNER], session, image)
                    done = await session.frame_in_turn(facts, image, body.seconds, body.index)
                    cached = None if done is None else done.num_cached_tokens
            return await self._told_of(session, name, cached)

    async def ask(self, request: Request) -> ASGIApp:
        ending = AsyncExitStack()
        try:
            data, reservation = await ending.enter_async_context(self._call(request))
            session, _, adapter = await self._found(request)
            chat, index = await self._parsed(data, partial(as_chat_body, data, asks=True))
            parsed_request = await self._parse_body(request, chat, self._answers.id_of(request), adapter)
            with unless_gone(request.scope):
                facts = await ending.enter_async_context(session.turn())
                source: AnswerSource
                if is_repeated(facts, index):
                    source = RecordReader(
                        AnswerRecord(await repeat_answer(self._engine, session, facts, parsed_request))
                    )
                else:
                    await self._fill(parsed_request, reservation)
                    source = self._stream(session, facts, parsed_request)
                    ending.callback(session.note_answer, facts, source)
                frames, tokenizer = (
                    self._answers.readers.frames_of(parsed_request),
                    self._engine.processor.tokenizer,
                )
                builder = ResponseBuilder(parsed_request, frames, [source], tokenizer)
                ending.callback(builder.close)
                await builder.open()
                if parsed_request.stream:
                    await builder.wait_for_output(self._settings.ping_s)
                    then = partial(_aside, ending.pop_all())
                    return self._answers.streams.of_session(builder, parsed_request, then)
                body = await builder.whole()
            return Response(
                body, media_type="application/json", headers={ID_HEADER: parsed_request.request_id}
            )
        except MMEngineError as error:
            raise session_error(error) from error
        finally:
            await ending.aclose()

    # Shared by the handlers

    @asynccontextmanager
    async def _call(self, request: Request) -> AsyncIterator[tuple[bytes, BodyReservation]]:
        """Admit a call. Yield the call's body and the reservation for its bytes. Engine errors are converted
        to ApiError.
        """
        owner = request.scope[OWNER]
        self._admission.take(owner)
        try:
            with self._admission.reserve(owner) as reservation:
                pieces = await self._admission.bodies.read(request.scope, request.receive, reservation)
                yield b"".join(pieces), reservation
        except MMEngineError as error:
            raise session_error(error) from error
        finally:
            self._admission.give(owner)

    async def _parsed(self, data: bytes, work: Callable[[], T]) -> T:
        return await self._answers.readers.parser_threads.run(len(data), work)

    async def _parse_body(self, request: Request, chat: bytes, name: str, adapter: str = "") -> ParsedRequest:
        """Parse a chat body. `name`: the request id. `adapter`: the session's adapter. Raises ApiError, for
        example if the body names another adapter.
        """
        parsed_request = await self._parsed(chat, partial(self._answers.readers.chat.read, chat, name))
        if not parsed_request.envelope.model:
            own = msgspec.structs.replace(parsed_request.envelope, model=adapter)
            parsed_request = msgspec.structs.replace(parsed_request, envelope=own)
        if parsed_request.answer_format.has_boxes:
            refuse_session()
        parsed_request = self._answers.readers.resolve_model(parsed_request, request.scope[OWNER])
        if parsed_request.adapter != adapter:
            raise ApiError(ErrorCode.INVALID_VALUE, OTHER_ADAPTER, FieldPath("model"))
        return parsed_request

    async def _fill(self, parsed_request: ParsedRequest, reservation: BodyReservation) -> None:
        """Read the uploaded files to which the message refers. The files' bytes count against
        `reservation`.
        """
        await self._answers.readers.media.uploads.fill(
            parsed_request, partial(self._admission.bodies.add, reservation)
        )

    def _stream(self, session: AsyncSession, facts: SessionFacts, parsed_request: ParsedRequest) -> Stream:
        """Submit a question to the session, and return the stream with the answer."""
        options = submit_options(parsed_request, "")
        options.pop("request_id")
        options.pop("cache_salt")
        return session.stream_in_turn(facts, _content(parsed_request), parsed_request.sampling, **options)

    async def _told_of(self, session: AsyncSession, name: str, cached: int | None) -> ASGIApp:
        return _json(object_of(await session.facts(), name, cached, session.num_frames_held))

    async def _found(self, request: Request) -> tuple[AsyncSession, str, str]:
        """Return the session in the request's path, its public id, and its adapter's name. Raises ApiError if
        the owner has no session with this id.
        """
        name = request.path_params["session_id"]
        session, adapter = await self._sessions.found(request.scope[OWNER], name)
        return session, name, adapter


def session_error(error: MMEngineError) -> ApiError:
    """Convert an engine error to the error that the client receives."""
    if error.code is ErrorCode.SESSION_NOT_FOUND:
        return ApiError(ErrorCode.SESSION_NOT_FOUND, "the session was closed", FieldPath("session_id"))
    return api_error(error)


def _content(parsed_request: ParsedRequest) -> list[Json]:
    """Return the content parts of the request's only message, in the multimodal processor's format."""
    messages = parsed_request.prompts[0].messages
    assert messages is not None
    content = messages[0]["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _picture(url: str) -> str:
    if not is_data_url(url):
        raise ApiError(
            ErrorCode.URL_NOT_FETCHED,
            f"{FIELD} must be a data: URL; frames are not fetched",
            FieldPath("image"),
        )
    return url


def _name(facts: SessionFacts, owner: str) -> str:
    return facts.session_id.removeprefix(log_request_id(owner, ""))


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _aside(ending: AsyncExitStack) -> None:
    """Release the session and the call's memory in a task. Called when the call's stream has ended."""
    task = asyncio.get_running_loop().create_task(ending.aclose())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


_ending: set[asyncio.Task[None]] = set()  # Holds the tasks, so that they are not garbage collected.

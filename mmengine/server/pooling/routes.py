"""Handlers for /v1/embeddings, /pooling, /v1/rerank and /score."""

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.request import PREFILL
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import request_ids
from mmengine.server.answers.headers import ID_HEADER, REQUEST_ID, is_request_id
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.body_fields import ignored_header
from mmengine.server.http.body_reader import ParserThreads
from mmengine.server.pooling.reader import ENVELOPE, PooledReader, PooledRequest
from mmengine.server.transport.sse import unless_gone

Read = Callable[[bytes, str, Options], PooledRequest]


class PoolingRoutes:
    """The routes that return vectors and scores. The constructor cancels the previous process's pooling
    requests, because no client can fetch the results any more.
    """

    def __init__(
        self, engine: ServedEngine, admission: Admission, reader: PooledReader, threads: ParserThreads
    ):
        self._engine, self._admission, self._reader, self._threads = engine, admission, reader, threads
        self._new_id = request_ids()
        for one in engine.recovered_requests():
            if one.envelope == ENVELOPE:
                engine.give_up(one.request_id)

    async def embeddings(self, request: Request) -> ASGIApp:
        return await self._answer(request, self._reader.embeddings)

    async def pooling(self, request: Request) -> ASGIApp:
        return await self._answer(request, self._reader.pooling)

    async def rerank(self, request: Request) -> ASGIApp:
        return await self._answer(request, self._reader.rerank)

    async def score(self, request: Request) -> ASGIApp:
        return await self._answer(request, self._reader.score)

    async def _answer(self, request: Request, read: Read) -> ASGIApp:
        owner, name = request.scope[OWNER], request.headers.get(ID_HEADER, "") or self._new_id()
        name = name if is_request_id(name) else self._new_id()
        request.scope[REQUEST_ID] = name
        options = Options(
            sampling=PREFILL,
            cache_salt=self._admission.salt_of(owner),
            tenant=self._admission.tenant_of(owner),
        )
        self._admission.take(owner)
        try:
            with self._admission.reserve(owner) as reservation:
                data = await self._admission.bodies.read(request.scope, request.receive, reservation)
                call = await self._threads.run(
                    reservation.num_bytes, lambda: read(b"".join(data), name, options)
                )
                data.clear()
                try:
                    with unless_gone(request.scope):
                        answers = await self._engine.pool(call.jobs)
                except Exception as error:
                    raise call.api_error(error, self._admission.rate.retry_after_s()) from error
                body = await self._threads.run(reservation.num_bytes, partial(call.render, answers))
        finally:
            self._admission.give(owner)
        headers = {ID_HEADER: name, **ignored_header(call.ignored)}
        return Response(body, 200, headers, "application/json")

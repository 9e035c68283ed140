"""Builds the endpoint tables for sessions, pooling and storage, and refuses unsupported routes."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mmengine.errors import ErrorCode
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.answers.request_readers import RequestReaders
from mmengine.server.answers.routes import AnswerRoutes
from mmengine.server.batches.file_routes import FileRoutes
from mmengine.server.batches.route_table import BATCH_ROUTES, FILE_ROUTES
from mmengine.server.batches.routes import BatchRoutes
from mmengine.server.batches.runner import BatchRunner
from mmengine.server.http.admission import Admission
from mmengine.server.http.errors import ApiError
from mmengine.server.http.model_names import ModelNames
from mmengine.server.http.route_records import Endpoints, answer_all, bind
from mmengine.server.pooling.reader import PooledReader
from mmengine.server.pooling.route_table import POOLING_ROUTES
from mmengine.server.pooling.routes import PoolingRoutes
from mmengine.server.sessions.registry import SessionRegistry
from mmengine.server.sessions.route_table import SESSION_ROUTES
from mmengine.server.sessions.routes import SessionRoutes
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Storage

_UNSUPPORTED = {
    "/v1/audio/transcriptions": "audio input is not supported",
    "/v1/audio/translations": "audio input is not supported",
    "/v1/audio/speech": "audio output is not supported",
    "/v1/images/generations": "image generation is not supported",
    "/v1/moderations": "moderation is not supported",
    "/v1/messages/batches": "batches of messages are not supported; use /v1/files and /v1/batches",
}


def session_endpoints(
    sessions: SessionRegistry | None,
    settings: ServerSettings,
    names: ModelNames,
    admission: Admission,
    answers: AnswerRoutes,
) -> Endpoints:
    if sessions is None:
        return answer_all(SESSION_ROUTES, refuse_sessions)
    routes = SessionRoutes(sessions, settings, names, admission, answers)
    return bind(SESSION_ROUTES, routes)


def pooling_endpoints(
    engine: ServedEngine, admission: Admission, reader: PooledReader, readers: RequestReaders
) -> Endpoints:
    return bind(POOLING_ROUTES, PoolingRoutes(engine, admission, reader, readers.parser_threads))


def storage_endpoints(
    storage: Storage, runner: BatchRunner, admission: Admission, settings: ServerSettings
) -> Endpoints:
    files = FileRoutes(storage, admission, settings.body_timeout_s)
    batches = BatchRoutes(storage, runner, admission, settings.reattach_s)
    return {**bind(FILE_ROUTES, files), **bind(BATCH_ROUTES, batches)}


async def refuse_without_log(request: Request) -> ASGIApp:
    text = "responses, files and batches require a log: start the server with --log"
    raise ApiError(ErrorCode.NO_LOG, text)


async def refuse_sessions(request: Request) -> ASGIApp:
    text = "this server has several engines, but a session needs one: use a server with a single engine"
    raise ApiError(ErrorCode.NO_SESSIONS, text)


async def refuse_unknown_route(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    why = _UNSUPPORTED.get(path, f"the route {path[:200]} does not exist; see /openapi.json for all routes")
    raise ApiError(ErrorCode.UNKNOWN_URL, why)

"""The ASGI application: checks the API key, calls the route's endpoint, and converts errors to responses.
Also runs the server's background tasks.
"""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from mmengine.errors import ErrorCode, in_one_line
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.answers.headers import ID_HEADER, MESSAGE_ID_HEADER, REQUEST_ID
from mmengine.server.answers.route_table import ANSWER_ROUTES, MESSAGES
from mmengine.server.answers.routes import AnswerRoutes
from mmengine.server.app.adapter_routes import LOAD, UNLOAD, AdapterRoutes
from mmengine.server.app.endpoints import (
    pooling_endpoints,
    refuse_unknown_route,
    refuse_without_log,
    session_endpoints,
    storage_endpoints,
)
from mmengine.server.app.openapi import serve_document
from mmengine.server.app.route_table import (
    ADAPTER_ROUTES,
    COUNT_ROUTES,
    HEALTH_ROUTES,
    SERVICE_ROUTES,
    STORED_ROUTES,
)
from mmengine.server.app.service_routes import ServiceRoutes
from mmengine.server.batches.recovered_rows import RecoveredRows
from mmengine.server.batches.runner import BatchRunner
from mmengine.server.chat.media_fetch import FetchMetrics
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.auth import ApiKeys
from mmengine.server.http.errors import ApiError, ClientLeft, api_error
from mmengine.server.http.metrics import HttpMetrics
from mmengine.server.http.model_names import ModelNames
from mmengine.server.http.route_records import Endpoints, answer_all, bind
from mmengine.server.live.routes import LIVE, LiveRoutes
from mmengine.server.messages.counting import MessageCounts
from mmengine.server.messages.errors import error_json, kind_of
from mmengine.server.pooling.reader import PooledReader
from mmengine.server.responses.route_table import RESPONSE_ROUTES
from mmengine.server.sessions.registry import SessionRegistry
from mmengine.server.settings import ServerSettings, is_loopback
from mmengine.server.storage.storage import Storage

if TYPE_CHECKING:  # OpenTelemetry is an optional dependency.
    from mmengine.server.calls.tracing import Tracing

LAG_EVERY_S = 0.5
# The status in logs and metrics if the client disconnects before the response begins, as in nginx.
LEFT_STATUS = 499
# HTTP methods that have a metrics label of their own.
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
_OPEN = {record.path for record in HEALTH_ROUTES}


class App:
    """The ASGI application for an engine. Must be created on the event loop.

    `names`: the names under which the model is served. `media_fetcher`: fetches media from URLs and local
    files; if None, the server refuses URLs and local files. `storage`: stored files, batches and responses;
    None for a server without a log. `tracing`: receives an OpenTelemetry span for each call. `live`: the log
    folder that /live shows. `admin_keys`: keys that may load adapters.
    """

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServerSettings,
        keys: ApiKeys,
        names: tuple[str, ...],
        media_fetcher: MediaFetcher | None = None,
        storage: Storage | None = None,
        tracing: "Tracing | None" = None,
        live: Path | None = None,
        admin_keys: ApiKeys | None = None,
    ):
        self._keys, self._settings = keys, settings
        self.metrics = HttpMetrics()
        self.admission = Admission(engine, settings, keys)
        # Must come before the registries below, which need the tenants of their recovered requests.
        self.admission.keep_tenants((one.request_id, one.tenant) for one in engine.recovered_requests())
        fetches, texts = FetchMetrics(media_fetcher), TokenTexts(engine.processor.tokenizer)
        recovered_rows = RecoveredRows(engine, storage.batches) if storage is not None else None
        served, root = ModelNames(names, engine), settings.lora_root
        given = (engine, settings, served, self.metrics, self.admission, texts)
        answers = AnswerRoutes(*given, media_fetcher, storage, tracing)
        self.calls = answers.calls
        self._adapters = AdapterRoutes(engine, served, self.admission, root, admin_keys)
        others = ServiceRoutes(*given, fetches, answers.readers.chat)
        pooled = PooledReader(engine, served, answers.readers.chat, settings)
        counts = MessageCounts(engine, self.admission, answers.readers)
        endpoints: Endpoints = {
            **bind(ANSWER_ROUTES, answers),
            **bind(COUNT_ROUTES, counts),
            **pooling_endpoints(engine, self.admission, pooled, answers.readers),
            **bind(ADAPTER_ROUTES, self._adapters),
            **bind(SERVICE_ROUTES, others),
            ("GET", "/openapi.json"): serve_document,
        }
        self._sessions = SessionRegistry.of_engine(
            engine, settings, self.admission, answers.readers.chat.media_options
        )
        endpoints |= session_endpoints(self._sessions, settings, served, self.admission, answers)
        self._storage, self._runner = storage, None
        if storage is not None and recovered_rows is not None:
            self._runner = BatchRunner(
                storage,
                engine,
                answers.readers,
                pooled,
                recovered_rows,
                self.admission,
                settings,
                self.metrics.line_answered,
            )
            self._show_kept(storage)
            endpoints |= storage_endpoints(storage, self._runner, self.admission, settings)
        else:
            endpoints |= answer_all(STORED_ROUTES, refuse_without_log)
        self._open, self._live = set(_OPEN), None
        if live is not None:
            self._live = LiveRoutes(live, settings, self.metrics)
            self._open.add(LIVE)  # The page needs no API key, because only its script reads data.
            endpoints |= self._live.endpoints()
        if (responses := answers.stored_response_routes) is not None:
            endpoints |= bind(RESPONSE_ROUTES, responses)
        routes = [Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()]
        self._known = {route.path for route in routes}
        self._patterns = [route for route in routes if "{" in route.path]
        # Most calls have a path without parameters. The router handles the remaining calls.
        self._endpoints = {key: each for key, each in endpoints.items() if "{" not in key[1]}
        # Caches the metrics of each (route, method, status), because prometheus_client's `labels` is slow.
        self._counted: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._router = Router(routes, redirect_slashes=False, default=refuse_unknown_route)

    def _show_kept(self, storage: Storage) -> None:
        self.metrics.batches.set_function(lambda: len(storage.batches.live()))
        self.metrics.kept_bytes.labels("answers").set_function(lambda: storage.answers.num_bytes)
        self.metrics.kept_bytes.labels("files").set_function(lambda: storage.files.num_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun, status = time.monotonic(), LEFT_STATUS

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["app"] = self  # Makes the router raise errors instead of sending responses.
        try:
            self._check_key(scope)
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is None:
                await self._router(scope, receive, noted)
            else:
                answer = await endpoint(Request(scope, receive))
                await answer(scope, receive, noted)
        except ClientLeft:
            self.metrics.left.inc()
        except asyncio.CancelledError:
            why = self.admission.draining() or self.admission.stuck_error(
                scope.get(REQUEST_ID, ""), can_reattach=False
            )
            if why is None or status != LEFT_STATUS:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            await self._refuse(why, scope, receive, noted)
        # The router raises HTTPException for a method that the path's route does not have.
        except HTTPException:
            allowed = self._allowed_methods(scope)
            text = f"{scope['method']} is not allowed on this route; use {allowed}"
            await self._refuse(
                ApiError(ErrorCode.METHOD_NOT_ALLOWED, text, headers={"Allow": allowed}),
                scope,
                receive,
                noted,
            )
        except ApiError as error:
            await self._refuse(error, scope, receive, noted)
        except Exception as error:
            operator_log.error("request failed", path=scope["path"][:200], reason=in_one_line(error))
            if status == LEFT_STATUS:
                await self._refuse(api_error(error), scope, receive, noted)
        finally:
            self._note(scope, status, time.monotonic() - begun)

    def _allowed_methods(self, scope: Scope) -> str:
        """Return the methods that exist for the call's path, in the format of the Allow header."""
        matching = [route for route in self._router.routes if route.matches(scope)[0] is Match.PARTIAL]
        methods = {name for route in matching if isinstance(route, Route) for name in route.methods or ()}
        return ", ".join(sorted(methods))

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if path in self._open:
            return
        if path in (LOAD, UNLOAD):
            scope[OWNER] = self._adapters.check_key(dict(scope["headers"]))
            return
        owner = self._keys.owner_of(dict(scope["headers"]))
        if owner is not None:
            scope[OWNER] = owner
            return
        client = scope.get("client")
        if path == "/metrics" and (self._settings.open_metrics or (client and is_loopback(client[0]))):
            return
        text = "the API key is missing or unknown; send it as Authorization: Bearer …"
        raise ApiError(ErrorCode.INVALID_API_KEY, text, headers={"www-authenticate": "Bearer"})

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        route = path
        if path not in self._known:
            matched = (each.path for each in self._patterns if each.path_regex.match(path))
            route = next(matched, "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        key = route, method, status
        if (counted := self._counted.get(key)) is None:
            counted = self._counted[key] = (
                self.metrics.requests.labels(route, method, str(status)),
                self.metrics.seconds.labels(route, method),
            )
        counted[0].inc()
        counted[1].observe(seconds)
        if path not in _OPEN:
            name = scope.get(REQUEST_ID, "")
            operator_log.info("http", id=name, route=route, status=status, seconds=round(seconds, 4))

    def count_probe(self, is_alive: bool) -> None:
        """Count a call of /health/live. lifecycle/acceptor.py responds to these calls. Thread-safe."""
        self.metrics.requests.labels("/health/live", "GET", "200" if is_alive else "503").inc()

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.count_error(error)
        headers, name = dict(error.headers), scope.get(REQUEST_ID)
        if name:
            headers[ID_HEADER] = name
        status, body = error.status, error.json()
        if scope["path"].startswith(MESSAGES):
            (status, _), body = kind_of(error), error_json(error, name)
            headers |= {MESSAGE_ID_HEADER: name} if name else {}
        await Response(body, status, headers, "application/json")(scope, receive, send)

    async def run(self) -> None:
        """Run the server's background tasks until cancelled: measure the event loop's lag, watch the log, run
        batches, and remove expired data.
        """
        tasks = [asyncio.create_task(self.watch_lag()), asyncio.create_task(self.admission.watch())]
        if self._sessions is not None:
            tasks.append(asyncio.create_task(self._sessions.keep_tenants()))
            tasks.append(asyncio.create_task(self._sessions.watch()))
        if self._storage is not None and self._runner is not None:
            tasks += [asyncio.create_task(self._storage.watch()), asyncio.create_task(self._runner.run())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.calls.flush()

    def close_pages(self) -> None:
        """Close the live pages' connections, which would otherwise stay open while the server shuts down."""
        if self._live is not None:
            self._live.close()

    async def watch_lag(self) -> None:
        """Measure how late the event loop wakes up. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.metrics.lag.observe(max(0.0, loop.time() - due))

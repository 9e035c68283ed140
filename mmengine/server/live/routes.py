"""Handlers for the page /live, its event stream, and its queries about the log. The page itself is public and
contains no data. Its script sends the API key with each call.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.errors import ErrorCode, FieldPath
from mmengine.replay.report.page import hash_of
from mmengine.server.chat.submission import log_request_id
from mmengine.server.http.admission import OWNER
from mmengine.server.http.errors import ApiError, api_error
from mmengine.server.http.metrics import HttpMetrics
from mmengine.server.live.feed import Feed
from mmengine.server.live.queries import QUESTIONS, LogQueries
from mmengine.server.settings import ServerSettings
from mmengine.server.transport.sse import EventStream, FrameSource, unless_gone

LIVE = "/live"
MAX_BACKLOG = 1024  # Maximum number of events that wait for a slow page.
# Scripts that the HTML report of a log also contains.
SHARED = ("data.js", "view.js", "lanes.js", "tracks.js", "panel.js", "input.js")
OWN = ("columns.js", "stream.js", "playground.js", "live.js")


def live_page() -> tuple[str, str]:
    """Return the live page's HTML, with scripts and styles, and its content security policy. The policy
    allows only these scripts and styles, and connections to this server.
    """
    report, here = files("mmengine.replay.report"), files("mmengine.server.live")
    style = (report / "page.css").read_text("utf-8") + (here / "live.css").read_text("utf-8")
    parts = [(report / name).read_text("utf-8") for name in SHARED]
    parts += [(here / name).read_text("utf-8") for name in OWN]
    script = '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src {hash_of(script)}; style-src {hash_of(style)}; connect-src 'self'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    html = (here / "live.html").read_text("utf-8")
    return html.replace("<!--STYLE-->", style).replace("<!--SCRIPT-->", script), policy


class LiveRoutes:
    """Handlers for /live. `folder`: the log's folder."""

    def __init__(self, folder: Path, settings: ServerSettings, metrics: HttpMetrics):
        self._feed, self._asking = Feed(folder), LogQueries(folder)
        self._settings, self._metrics = settings, metrics
        self._html, self._policy = live_page()

    def endpoints(self) -> dict[tuple[str, str], Callable[[Request], Awaitable[ASGIApp]]]:
        return {
            ("GET", LIVE): self.page,
            ("GET", f"{LIVE}/events"): self.events,
            ("GET", f"{LIVE}/ask/{{question}}"): self.ask,
        }

    async def page(self, request: Request) -> ASGIApp:
        headers = {"content-security-policy": self._policy, "cache-control": "no-cache"}
        return Response(self._html, 200, headers, "text/html")

    async def events(self, request: Request) -> ASGIApp:
        viewer: FrameSource = self._feed.view()
        self._metrics.streams.inc()
        return EventStream(
            viewer,
            b"",
            {},
            ping_s=self._settings.ping_s,
            slow_reader_s=self._settings.slow_reader_s,
            max_backlog=MAX_BACKLOG,
            sent=self._metrics.count_events,
            to_api_error=api_error,
            ended=self._metrics.stream_ended,
            interrupted=lambda: None,
        )

    async def ask(self, request: Request) -> ASGIApp:
        question = request.path_params["question"]
        name = request.query_params.get("request", "")
        # The page's playground sends the client's request id. In the log, the id begins with the API key's
        # hash.
        if question == "drafts":
            name = log_request_id(request.scope[OWNER], name)
        if question not in QUESTIONS or not (name or question == "trace"):
            raise ApiError(
                ErrorCode.NOT_FOUND, f"ask {', '.join(QUESTIONS)} of a request", FieldPath("request")
            )
        with unless_gone(request.scope):
            answer = await self._asking.answer(question, name)
        headers = {}
        if question == "trace":
            headers["content-disposition"] = 'attachment; filename="trace.json"'
        return Response(answer, 200, headers, "application/json")

    def close(self) -> None:
        self._feed.close()

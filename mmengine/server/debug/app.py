"""The debug server's routes: a page, its scripts, and the execution of debugger commands.

A log may contain other people's prompts. Any program on this machine, and any page in the user's browser, can
send requests to a port of 127.0.0.1. Therefore each path begins with a random token, and requests with a
foreign Host or Origin header are refused. Breakpoint conditions cannot contain Python code.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmengine.errors import MMEngineError
from mmengine.paused_collection import paused_collection
from mmengine.replay.debug.commands.registry import COMMANDS
from mmengine.replay.debug.commands.session import Session
from mmengine.replay.debug.commands.views import INFO
from mmengine.replay.debug.page.write import plain_page
from mmengine.replay.debug.views import Block

MAX_BODY_BYTES = 64 * 2**10
MAX_LINES = 16  # Maximum number of commands in a request.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


class Lines(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to run debugger commands."""

    lines: list[str]


class Answer(msgspec.Struct):
    """The output of a command. `error`: the error message, or ""."""

    blocks: list[Block]
    error: str


class DebugApp:
    """The server's ASGI app. `port`: the port in its address. `token`: the secret in its paths."""

    def __init__(self, session: Session, name: str, port: int, token: str = ""):
        self._session, self._name = session, name
        self.token = token or secrets.token_urlsafe(24)
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._turn = asyncio.Lock()
        page, script, style = plain_page()
        script += (files("mmengine.server.debug") / "remote.js").read_text("utf-8")
        self._files = {
            "": (page, "text/html"),
            "page.js": (script, "text/javascript"),
            "page.css": (style, "text/css"),
        }

    def interrupt(self) -> None:
        """End the running command, and refuse later commands that change the position in the log."""
        for each in self._session.debuggers:
            each.navigator.interrupt()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        response = await self._respond(request)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        hosts, origins = request.headers.getlist("host"), set(request.headers.getlist("origin"))
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return _refusal(421, "the Host header does not name the debug server")
        if origins - {f"http://{host}" for host in self._hosts}:
            return _refusal(403, "requests from other origins are refused")
        given, slash, name = request.url.path.removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(given.encode(), self.token.encode()):
            return _refusal(404, "open the address that mmengine log debug --web printed")
        routes: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("GET", "about"): self._about,
            ("POST", "run"): self._run,
        }
        if request.method == "GET" and name in self._files:
            text, kind = self._files[name]
            return Response(text, 200, HEADERS, kind)
        route = routes.get((request.method, name))
        return await route(request) if route else _refusal(404, "there is no such page")

    async def _about(self, request: Request) -> Response:
        names = [name for each in COMMANDS.values() for name in (each.name, *each.aliases)]
        return _json({"name": self._name, "commands": names, "views": INFO})

    async def _run(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _refusal(415, "send application/json")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _refusal(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        try:
            lines = msgspec.json.decode(body, type=Lines).lines
        except msgspec.DecodeError as error:
            return _refusal(400, f"the body is not {{'lines': […]}}: {error}")
        if len(lines) > MAX_LINES:
            return _refusal(400, f"the request has {len(lines)} command lines; the limit is {MAX_LINES}")
        async with self._turn:
            answers = await asyncio.to_thread(self._answers, lines)
        return _json(answers)

    def _answers(self, lines: list[str]) -> list[Answer]:
        """Run commands in the session. A command that reads damaged log bytes gets an error."""
        answers = []
        with paused_collection():  # A garbage collection can take longer than a command.
            for line in lines:
                try:
                    answers.append(Answer(*self._session.try_run(line)))
                except MMEngineError as error:
                    answers.append(Answer([], str(error)))
        return answers


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), 200, HEADERS, "application/json")


def _refusal(status: int, text: str) -> Response:
    return Response(text, status, HEADERS, "text/plain")

"""The record that describes a route: method, path, endpoint, and operation in the OpenAPI document.

Each package declares the records for its routes. The application binds the records to the object with the
handlers, and `app/openapi.py` renders the operations.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from mmengine.server.http.errors import Json

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Endpoints = dict[tuple[str, str], Endpoint]  # The key is (method, path).
Body = type[msgspec.Struct]

OVERLOADED = 529  # Anthropic's status in place of 429 and 503.
READS = (401, 405, 408, 413, 415, 429, 431, 500, 503)  # Error statuses of a route that reads a body.
NO_BODY = (401, 404, 405, 431, 500)  # Error statuses of a route without a body.
ANSWERS = (400, 404, 409, 422, 504, *READS)  # Error statuses of a route that creates an answer.


class Stream(NamedTuple):
    """A route's server-sent events.

    `events`: the structs that an event's data may contain. `done`: the last event's text. If `done` is "",
    each event is named after its struct's tag.
    """

    events: tuple[Body, ...]
    done: str = ""


class Operation(NamedTuple):
    """A route's OpenAPI description.

    `answer`: the struct or the media type of a response with status 200. `refusals`: the error statuses.
    `refusal`: the struct of error bodies, or None for OpenAI's. `not_ready`: the struct for status 503 if
    its body is not an error, as for /health. `query`: the names of the query parameters. `creates_answer`:
    whether the route has the request and response headers for generated answers.
    """

    summary: str
    answer: Body | str
    answer_text: str
    refusals: tuple[int, ...]
    body: Body | None = None
    body_type: str = "application/json"
    query: tuple[str, ...] = ()
    stream: Stream | None = None
    refusal: Body | None = None
    not_ready: Body | None = None
    creates_answer: bool = False
    is_public: bool = False  # Needs no API key.


class RouteRecord(NamedTuple):
    """A route. `endpoint` is the unbound method that handles the route. `operation` is None if the OpenAPI
    document omits the route.
    """

    method: str
    path: str
    endpoint: Callable[[Any, Request], Awaitable[ASGIApp]]
    operation: Operation | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.method, self.path


def answer_operation(
    summary: str, body: Body, answer: Body, stream: Stream, refusal: Body | None = None
) -> Operation:
    """Return the operation for a route that generates an answer, which the client may request as a stream."""
    return Operation(
        summary,
        answer,
        "The answer, or with stream true its events",
        ANSWERS if refusal is None else (*ANSWERS, OVERLOADED),
        body,
        stream=stream,
        refusal=refusal,
        creates_answer=True,
    )


def bind(records: Iterable[RouteRecord], instance: object) -> Endpoints:
    """Return the endpoints in `records` as methods of `instance`."""
    return {record.key: MethodType(record.endpoint, instance) for record in records}


def answer_all(records: Iterable[RouteRecord], endpoint: Endpoint) -> Endpoints:
    """Return a table in which all records have the same `endpoint`. The server uses these tables to refuse
    routes that it does not offer.
    """
    return {record.key: endpoint for record in records}


def parameter(name: str, place: str) -> Json:
    """Return the OpenAPI parameter object for a string parameter. `place`: path or query."""
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


HEADERS: Mapping[int, tuple[str, ...]] = {
    405: ("allow",),
    429: ("retry-after",),
    503: ("retry-after",),
    OVERLOADED: ("retry-after",),
}
PAGES = ("after", "limit", "order")  # Query parameters of routes that return a list.

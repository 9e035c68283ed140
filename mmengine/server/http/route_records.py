"""A route as a record: method, path, endpoint, and the operation that the OpenAPI document shows for it.

Each module with routes declares its records beside the class that answers them. The application binds the
records to an instance; `app/openapi.py` renders the operations. Neither repeats a path.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from mmengine.server.http.errors import Json

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Endpoints = dict[tuple[str, str], Endpoint]  # by method and path
Body = type[msgspec.Struct]

OVERLOADED = 529  # Anthropic's status for 429 and 503
READS = (401, 405, 408, 413, 415, 429, 431, 500, 503)  # refusals of a route that reads a body
NO_BODY = (401, 404, 405, 431, 500)  # refusals of a route that reads no body
ANSWERS = (400, 404, 409, 422, 504, *READS)  # refusals of a route that creates an answer


class Stream(NamedTuple):
    """A route's server-sent events.

    `events`: the structs that `data` holds. `done`: the last event's text; "" when events carry names, which
    are the structs' tags.
    """

    events: tuple[Body, ...]
    done: str = ""


class Operation(NamedTuple):
    """A route's OpenAPI description.

    `answer`: the struct for status 200, or a media type. `refusals`: the error statuses. `refusal`: the
    struct for error bodies, None for OpenAI's. `not_ready`: the struct for status 503 if that status is an
    answer. `query`: the query parameters' names. `creates_answer`: the route takes and returns the answer
    headers.
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
    is_public: bool = False  # no key is needed


class RouteRecord(NamedTuple):
    """`endpoint`: a method in the class that answers the route. `operation` None: not in the document."""

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
    """Return the operation for a route that creates an answer, streamed or whole."""
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
    """Return the endpoints in `records`, bound to `instance`."""
    return {record.key: MethodType(record.endpoint, instance) for record in records}


def answer_all(records: Iterable[RouteRecord], endpoint: Endpoint) -> Endpoints:
    """Return `endpoint` for every record, as where the server lacks the part that answers them."""
    return {record.key: endpoint for record in records}


def parameter(name: str, place: str) -> Json:
    """Return the OpenAPI parameter `name` in `place` (path or query), a string."""
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


HEADERS: Mapping[int, tuple[str, ...]] = {
    405: ("allow",),
    429: ("retry-after",),
    503: ("retry-after",),
    OVERLOADED: ("retry-after",),
}
PAGES = ("after", "limit", "order")  # query parameters of a list

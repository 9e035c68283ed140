"""The routes of stored responses, as records."""

from mmengine.server.http.route_records import NO_BODY, PAGES, Operation, RouteRecord, Stream
from mmengine.server.responses.routes import ResponseRoutes
from mmengine.server.responses.schemas import EVENTS, InputItems, Response, ResponseDeleted

_RESPONSE = "/v1/responses/{response_id}"
RESPONSE_ROUTES = (
    RouteRecord(
        "GET",
        _RESPONSE,
        ResponseRoutes.get,
        Operation(
            "A stored response",
            Response,
            "It as it is now, or with stream true its events",
            (400, 429, 503, *NO_BODY),
            query=("stream", "starting_after"),
            stream=Stream(EVENTS),
        ),
    ),
    RouteRecord(
        "DELETE",
        _RESPONSE,
        ResponseRoutes.delete,
        Operation("Delete it", ResponseDeleted, "It is gone", (503, *NO_BODY)),
    ),
    RouteRecord(
        "POST",
        f"{_RESPONSE}/cancel",
        ResponseRoutes.cancel,
        Operation("Cancel it", Response, "The response", (503, *NO_BODY)),
    ),
    RouteRecord(
        "GET",
        f"{_RESPONSE}/input_items",
        ResponseRoutes.input_items,
        Operation("What it was asked", InputItems, "A page", (400, 503, *NO_BODY), query=PAGES),
    ),
)

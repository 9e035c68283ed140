"""The route table for stored responses, with their OpenAPI descriptions."""

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
            "Get a stored response",
            Response,
            "The current response, or its events with stream=true",
            (400, 429, 503, *NO_BODY),
            query=("stream", "starting_after"),
            stream=Stream(EVENTS),
        ),
    ),
    RouteRecord(
        "DELETE",
        _RESPONSE,
        ResponseRoutes.delete,
        Operation("Delete a stored response", ResponseDeleted, "The response was deleted", (503, *NO_BODY)),
    ),
    RouteRecord(
        "POST",
        f"{_RESPONSE}/cancel",
        ResponseRoutes.cancel,
        Operation("Cancel a running response", Response, "The response", (503, *NO_BODY)),
    ),
    RouteRecord(
        "GET",
        f"{_RESPONSE}/input_items",
        ResponseRoutes.input_items,
        Operation(
            "List the input items of a response",
            InputItems,
            "A page of items",
            (400, 503, *NO_BODY),
            query=PAGES,
        ),
    ),
)

"""The route table for sessions, with their OpenAPI descriptions."""

from mmengine.server.chat.response_schemas import ChatAnswer, ChatEvent
from mmengine.server.http.route_records import (
    NO_BODY,
    READS,
    Operation,
    RouteRecord,
    Stream,
    answer_operation,
)
from mmengine.server.sessions.bodies import (
    AppendBody,
    AskBody,
    FrameBody,
    SessionBody,
    SessionDeleted,
    SessionObject,
    SessionObjects,
)
from mmengine.server.sessions.routes import SessionRoutes

_SESSION = "/v1/sessions/{session_id}"
_CHANGES = (400, 404, 409, *READS)
SESSION_ROUTES = (
    RouteRecord(
        "POST",
        "/v1/sessions",
        SessionRoutes.create,
        Operation("Open a session", SessionObject, "The session", _CHANGES, SessionBody),
    ),
    RouteRecord(
        "GET",
        "/v1/sessions",
        SessionRoutes.list_sessions,
        Operation("List the caller's sessions", SessionObjects, "All sessions", (503, *NO_BODY)),
    ),
    RouteRecord(
        "GET",
        _SESSION,
        SessionRoutes.get,
        Operation("Get a session", SessionObject, "The session", (503, *NO_BODY)),
    ),
    RouteRecord(
        "DELETE",
        _SESSION,
        SessionRoutes.delete,
        Operation("Close a session", SessionDeleted, "Closed", (503, *NO_BODY)),
    ),
    RouteRecord(
        "POST",
        f"{_SESSION}/append",
        SessionRoutes.append,
        Operation("Append texts, images and videos", SessionObject, "The session", _CHANGES, AppendBody),
    ),
    RouteRecord(
        "POST",
        f"{_SESSION}/frame",
        SessionRoutes.frame,
        Operation("Append a frame of a video", SessionObject, "The session", _CHANGES, FrameBody),
    ),
    RouteRecord(
        "POST",
        f"{_SESSION}/ask",
        SessionRoutes.ask,
        answer_operation("Ask a question in a session", AskBody, ChatAnswer, Stream((ChatEvent,), "[DONE]")),
    ),
)

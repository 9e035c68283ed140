"""The routes of /v1/sessions, as records."""

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
        Operation("The caller's sessions", SessionObjects, "All of them", (503, *NO_BODY)),
    ),
    RouteRecord(
        "GET",
        _SESSION,
        SessionRoutes.get,
        Operation("It as it is now", SessionObject, "The session", (503, *NO_BODY)),
    ),
    RouteRecord(
        "DELETE",
        _SESSION,
        SessionRoutes.delete,
        Operation("Close it", SessionDeleted, "It is gone", (503, *NO_BODY)),
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
        answer_operation(
            "Ask it, and answer as chat does", AskBody, ChatAnswer, Stream((ChatEvent,), "[DONE]")
        ),
    ),
)

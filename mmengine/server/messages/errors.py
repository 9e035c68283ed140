"""Renders errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

import msgspec

from mmengine.errors import ErrorCode
from mmengine.server.http.errors import ApiError
from mmengine.server.http.route_records import OVERLOADED

# Error codes for temporary conditions, with status 529.
_OVERLOADED = (
    ErrorCode.QUEUE_FULL,
    ErrorCode.BODIES_FULL,
    ErrorCode.NOT_READY,
    ErrorCode.SHUTTING_DOWN,
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def kind_of(error: ApiError) -> tuple[int, str]:
    """Return an error's HTTP status, and Anthropic's error type."""
    if error.code in _OVERLOADED:
        return OVERLOADED, "overloaded_error"
    if error.status in _TYPES:
        return error.status, _TYPES[error.status]
    return error.status, "invalid_request_error" if error.status < 500 else "api_error"


def error_json(error: ApiError, request_id: str | None) -> bytes:
    """Return an error response's body as JSON. Anthropic's format has no `param`, so the message names the
    field.
    """
    message, param = error.message, error.param
    if param is not None and not error.names_field:
        message = f"{param}: {message}"
    details = {"type": kind_of(error)[1], "message": message}
    return msgspec.json.encode({"type": "error", "error": details, "request_id": request_id})

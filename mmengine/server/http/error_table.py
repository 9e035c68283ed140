"""Maps mmengine's error codes to HTTP statuses and to the error codes in responses. The Messages API uses
Anthropic's statuses instead.
"""

from typing import Literal, NamedTuple

from mmengine.errors import ErrorCode as C

# When a client may retry: "soon" (after some calls have ended) or "later" (after a pause).
Retry = Literal["soon", "later", "never"]


class HttpError(NamedTuple):
    """The HTTP response for an error. `code`: the code in the response's body."""

    status: int
    code: str | None = None
    retry: Retry | None = None


HTTP_ERRORS = {
    C.INVALID_VALUE: HttpError(400),
    C.INVALID_GRAMMAR: HttpError(400),
    C.INVALID_TYPE: HttpError(400, "invalid_type"),
    C.INVALID_JSON: HttpError(400, "invalid_json"),
    C.MISSING_FIELD: HttpError(400, "missing_required_parameter"),
    C.UNKNOWN_FIELD: HttpError(400, "unknown_parameter"),
    C.UNSUPPORTED_FIELD: HttpError(400, "unsupported_parameter"),
    C.UNSUPPORTED_CONTENT: HttpError(400, "unsupported_content"),
    C.INVALID_STRUCTURED_OUTPUTS: HttpError(400, "invalid_structured_outputs"),
    C.INVALID_ADAPTER: HttpError(400, "invalid_adapter"),
    C.CONTEXT_LENGTH_EXCEEDED: HttpError(400, "context_length_exceeded"),
    C.FILES_FULL: HttpError(400, "files_full"),
    C.INVALID_MEDIA: HttpError(400, "invalid_media"),
    C.MEDIA_NOT_FETCHED: HttpError(400, "media_not_fetched"),
    C.MEDIA_NOT_STORED: HttpError(400, "media_not_kept"),
    C.URL_NOT_FETCHED: HttpError(400, "url_not_fetched"),
    C.URL_NOT_ALLOWED: HttpError(400, "url_not_allowed"),
    C.PREVIOUS_RESPONSE_NOT_FOUND: HttpError(400, "previous_response_not_found"),
    C.PREVIOUS_RESPONSE_NOT_FINISHED: HttpError(400, "previous_response_not_finished"),
    C.INVALID_API_KEY: HttpError(401, "invalid_api_key"),
    C.NO_LORA_ROOT: HttpError(403, "no_lora_root"),
    C.NOT_FOUND: HttpError(404, "not_found"),
    C.UNKNOWN_URL: HttpError(404, "unknown_url"),
    C.MODEL_NOT_FOUND: HttpError(404, "model_not_found"),
    C.FILE_NOT_FOUND: HttpError(404, "file_not_found"),
    C.BATCH_NOT_FOUND: HttpError(404, "batch_not_found"),
    C.SESSION_NOT_FOUND: HttpError(404, "session_not_found"),
    C.NO_LOG: HttpError(404, "no_log"),
    C.NO_SESSIONS: HttpError(404, "no_sessions"),
    C.METHOD_NOT_ALLOWED: HttpError(405),
    C.BODY_TIMEOUT: HttpError(408),
    C.REQUEST_ID_IN_USE: HttpError(409, "request_id_in_use", "never"),
    C.KEY_IN_USE: HttpError(409, "key_in_use", "never"),
    C.FILE_IN_USE: HttpError(409),
    C.SESSION_BUSY: HttpError(409, "session_busy", "soon"),
    C.SESSION_INDEX: HttpError(409, "session_index"),
    C.BATCH_NOT_CANCELLABLE: HttpError(409, "batch_not_cancellable"),
    C.REQUEST_TOO_LARGE: HttpError(413, "request_too_large"),
    C.FILE_TOO_LARGE: HttpError(413, "file_too_large"),
    C.LOG_TOO_LARGE: HttpError(413, "log_too_large"),
    C.BODY_COMPRESSED: HttpError(415),
    C.KEY_REUSED: HttpError(422, "key_reused", "never"),
    C.QUEUE_FULL: HttpError(429, "queue_full", "soon"),
    C.KEY_SHARE_FULL: HttpError(429, "key_share_full"),
    C.BODIES_FULL: HttpError(429, "bodies_full"),
    C.UPLOADS_FULL: HttpError(429, "uploads_full"),
    C.LIVE_PAGES_FULL: HttpError(429, "live_pages_full"),
    C.HEAD_TOO_LARGE: HttpError(431),
    C.CLIENT_LEFT: HttpError(499, "left"),
    C.REQUEST_FAILED: HttpError(500, "request_failed"),
    C.CANCELLED: HttpError(500, "request_cancelled"),
    C.INTERNAL_ERROR: HttpError(500, "internal_error"),
    C.ENGINE_FAILED: HttpError(503, "engine_failed", "later"),
    C.EXECUTOR_FAILED: HttpError(503, "engine_failed", "later"),
    C.STORAGE_FAILED: HttpError(503, "storage_failed", "later"),
    C.NOT_READY: HttpError(503, "not_ready"),
    C.SHUTTING_DOWN: HttpError(503, "shutting_down"),
    C.DEADLINE_EXCEEDED: HttpError(504, "deadline_exceeded", "never"),
}
# Codes of errors in settings, models and logs. Clients see the code engine_failed instead.
INTERNAL = frozenset(C) - HTTP_ERRORS.keys()
# Codes of errors in images, video and audio. In all APIs, the path in such an error may begin with
# `messages`.
MEDIA_CODES = frozenset((C.INVALID_MEDIA, C.MEDIA_NOT_FETCHED))
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    **dict.fromkeys((400, 405, 408, 409, 413, 415, 422, 431), "invalid_request_error"),
}
STATUSES = {  # Descriptions in the OpenAPI document.
    400: "The request is invalid; param names the field",
    401: "The API key is missing or unknown",
    403: "The call is not allowed",
    404: "The model, file, batch, session or route does not exist",
    405: "The method is not allowed",
    408: "The body did not arrive in time",
    409: "A request with this request_id, Idempotency-Key or session is running, or the call comes too late",
    413: "The body is too large",
    415: "The body is compressed",
    422: "This request_id or Idempotency-Key was used with another body",
    429: "The queue is full, or request bodies take too much memory",
    431: "The request's head is too large",
    500: "The request failed",
    503: "The server is shutting down, or is not ready (the message has the reasons)",
    504: "deadline_s passed",
    529: "The queue is full, or the server is not ready or shutting down",
}

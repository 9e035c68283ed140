"""The exception for errors that clients receive, and functions that create these errors. An error response
has OpenAI's format: {"error": {"message", "type", "param", "code"}}.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from mmengine.decode_errors import decode_error, utf16_hint
from mmengine.errors import FIELD, PROMPTS, ErrorCode, FieldPath, MMEngineError, in_one_line
from mmengine.server.http.error_table import HTTP_ERRORS, INTERNAL, MEDIA_CODES, TYPES
from mmengine.server.http.json_values import MAX_VALUES, has_too_many_values

Json = dict[str, object]
MAX_MESSAGE_CHARS = 2000  # Longer error messages are truncated.
LATER_S = 5  # Minimum Retry-After in seconds while the server is not ready or shuts down.
_MAX_SEARCHED = 2**20  # Maximum number of bytes to search for an error's cause.
_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_STOPPED = "the engine failed, and the server's log says why; try again later"
_OF_ALL = frozenset(("prompt", "request_id", "session_id"))  # Fields that any route's errors may name.
_D = TypeVar("_D")
_T = TypeVar("_T")


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ApiError(Exception):
    """An error for an HTTP client.

    `path`: the invalid field's path in the body. FIELD in `text` stands for the field's name. `has_param`:
    whether the response names the field in `param`. HTTP_ERRORS maps `code` to the HTTP status and to the
    response's code.
    """

    def __init__(
        self,
        code: ErrorCode,
        text: str,
        path: str | Iterable[str | int] = (),
        *,
        headers: Mapping[str, str] | None = None,
        has_param: bool = True,
    ):
        self.code, self.text, self.headers = code, text, dict(headers or {})
        self.path = FieldPath(path) if isinstance(path, str) else FieldPath(*path)
        self.has_param = has_param
        self.status, self._name, retry = HTTP_ERRORS[code]
        if retry == "never":
            self.headers.setdefault("x-should-retry", "false")
        super().__init__(self.message)

    @property
    def message(self) -> str:
        return self.text.replace(FIELD, str(self.path) or "the body")[:MAX_MESSAGE_CHARS]

    @property
    def param(self) -> str | None:
        return str(self.path) if self.has_param and self.path else None

    @property
    def names_field(self) -> bool:
        """Whether the message contains the field's name."""
        return FIELD in self.text

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(self.message, TYPES.get(self.status, "server_error"), self.param, self._name)

    def at(self, path: FieldPath) -> "ApiError":
        """Return a copy of the error for the field at `path`."""
        return ApiError(self.code, self.text, path, headers=self.headers)

    def renamed(self, name: Callable[[FieldPath], FieldPath]) -> "ApiError":
        """Return a copy of the error with the path `name(path)`."""
        return ApiError(self.code, self.text, name(self.path), headers=self.headers, has_param=self.has_param)

    def json(self) -> bytes:
        return msgspec.json.encode({"error": self.body})


class ClientLeft(Exception):
    """The client closed its connection."""


def api_error(error: BaseException, params: frozenset[str] = frozenset(), retry_after_s: int = 1) -> ApiError:
    """Return the client's error for an exception. `params`: fields that the response's `param` may name."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, MMEngineError):
        text = f"the server failed ({type(error).__name__}); the server's log says more"
        return ApiError(ErrorCode.INTERNAL_ERROR, text)
    code, text = error.code, error.text
    # The original message may contain a library's addresses and paths.
    if code is ErrorCode.EXECUTOR_FAILED:
        text = _STOPPED
    elif code in INTERNAL:
        code = ErrorCode.ENGINE_FAILED
    path = _in_body(error.path, params)
    fields = params | _OF_ALL | ({"messages"} if code in MEDIA_CODES else set())
    found = ApiError(code, text, path, has_param=bool(path) and path[0] in fields)
    match HTTP_ERRORS[code].retry:
        case "soon":
            found.headers["retry-after"] = str(max(1, retry_after_s))
        case "later":
            found.headers["retry-after"] = str(max(LATER_S, retry_after_s))
    return found


def _in_body(path: FieldPath, params: frozenset[str]) -> FieldPath:
    """Return the path in the body for a path in the engine's input."""
    if path[:1] == (PROMPTS,):
        path = FieldPath(*path[2:])
    return FieldPath("messages") if path == ("prompt",) and "messages" in params else path


def deadline_error() -> ApiError:
    """Return the error for a request whose deadline passed."""
    text = f"the deadline passed before the answer was complete; raise {FIELD}, or send a smaller request"
    return ApiError(ErrorCode.DEADLINE_EXCEEDED, text, "deadline_s")


def cancelled_error() -> ApiError:
    """Return the error for a cancelled request."""
    return ApiError(ErrorCode.CANCELLED, "the request was cancelled")


def request_failed_error(request_id: str) -> ApiError:
    """Return the error for a request that failed in the engine. The message leaves out the reason, because a
    library's error may contain addresses and paths. The server's log has the reason under the request id.
    """
    return ApiError(ErrorCode.REQUEST_FAILED, f"request {request_id} failed; the server's log says why")


def shutdown_error(retry_after_s: int) -> ApiError:
    text = "the server is shutting down; use another server, or try again later"
    return ApiError(ErrorCode.SHUTTING_DOWN, text, headers={"retry-after": str(retry_after_s)})


def interrupted_error(request_id: str, has_log: bool, retry_after_s: int) -> ApiError:
    """Return the error for a request that is still running when the server ends."""
    fate = (
        "stays in the log, and the next server with this log finishes the request"
        if has_log
        else "is cancelled, because there is no log: send it again"
    )
    text = f"the server is shutting down; request {request_id} {fate}"
    return ApiError(ErrorCode.SHUTTING_DOWN, text, headers={"retry-after": str(retry_after_s)})


def log_error(request_id: str, why: str, is_kept: bool, retry_after_s: int) -> ApiError:
    """Return the error for a running request whose events cannot be written to the log. `is_kept`: whether a
    later call may get the answer.
    """
    kept = "continues once the log can be written: repeat the call to get the answer"
    fate = kept if is_kept else "is cancelled: send it again"
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(ErrorCode.NOT_READY, f"{why}; request {request_id} {fate}", headers=headers)


def not_ready_error(reasons: tuple[str, ...], retry_after_s: int) -> ApiError:
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(ErrorCode.NOT_READY, f"not ready: {'; '.join(reasons)}", headers=headers)


def unknown_model_error(name: str, names: Sequence[str]) -> ApiError:
    """Return the error for a call to a model that is not among `names`."""
    text = f"the model {name[:256]!r} is not served; use one of {', '.join(names)}"
    return ApiError(ErrorCode.MODEL_NOT_FOUND, text, "model")


def decode_body(data: _D, decode: Callable[[_D], _T]) -> _T:
    """Decode a body, or a msgspec.Raw from a body, with the decoder `decode`. Raises ApiError."""
    if isinstance(data, bytes) and has_too_many_values(data):
        text = (
            f"the body has more than {MAX_VALUES} values (commas, brackets and braces outside of strings): "
            "send fewer messages or tools"
        )
        raise ApiError(ErrorCode.REQUEST_TOO_LARGE, text)
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if isinstance(data, bytes) and (hint := utf16_hint(data)):
            raise ApiError(ErrorCode.INVALID_JSON, f"the body is not valid JSON: {hint}") from None
        view = memoryview(data) if isinstance(data, bytes | msgspec.Raw) else memoryview(b"")
        raise _undecodable(error, view) from None


def _lone_surrogate(data: memoryview) -> str:
    r"""Return the first escape in `data` for an unpaired surrogate, such as \ud83d, or ""."""
    for found in _ESCAPES.finditer(data[:_MAX_SEARCHED]):
        if found["lone"]:
            return bytes(found["lone"]).decode()
    return ""


def _undecodable(error: Exception, data: memoryview) -> ApiError:
    """Return the error for a body that is invalid JSON or contains a value of the wrong type."""
    if isinstance(error, RecursionError):
        text = "the body is not valid JSON, or its lists and objects are nested too deeply; flatten them"
        return ApiError(ErrorCode.INVALID_JSON, text)
    if not isinstance(error, msgspec.ValidationError):
        if escape := _lone_surrogate(data):
            text = (
                f"the body is not valid JSON: {escape} is half of a surrogate pair; send both halves, "
                "and cut texts between characters"
            )
            return ApiError(ErrorCode.INVALID_JSON, text)
        return ApiError(ErrorCode.INVALID_JSON, f"the body is not valid JSON: {in_one_line(error, 120)}")
    found = decode_error(error)
    match found.code:
        case ErrorCode.MISSING_FIELD:
            return ApiError(found.code, f"{FIELD} {found.text}", found.path)
        case ErrorCode.INVALID_TYPE:
            return ApiError(found.code, f"{FIELD}: {found.text}", found.path)
    text = f"the body must be a JSON object with the fields of this route ({found.text})"
    return ApiError(ErrorCode.INVALID_VALUE, text)

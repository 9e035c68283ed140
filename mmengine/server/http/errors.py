"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}} and a status."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from mmengine.errors import (
    ExecutorFailed,
    InvalidMedia,
    InvalidRequest,
    KeepFailed,
    MMEngineError,
    QueueFull,
    RequestFailed,
    SessionBusy,
    in_one_line,
)
from mmengine.processing.fetch.refusals import FetchRefused
from mmengine.server.http.json_values import MAX_VALUES, has_too_many_values

Json = dict[str, object]
MAX_MESSAGE_CHARS = 2000  # of an error; the rest is cut
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
LATER_S = 5  # before which nobody needs to ask again a server that is not ready, or that ends
STATUSES = {  # what each says
    400: "What was asked cannot be done; param names the field",
    401: "No key, or an unknown one",
    403: "Not allowed here",
    404: "No such model, file, batch or session, or no such route",
    405: "Another method is wanted",
    408: "The body did not come in time",
    409: "In use, or too late: a request with this request_id, or Idempotency-Key, or of this session, runs",
    413: "The body is too large",
    415: "The body is compressed",
    422: "Another body came with this request_id, or Idempotency-Key, before",
    429: "The queue is full, or bodies fill their room",
    431: "The head is too large",
    500: "The request failed",
    503: "Not ready, with the reasons, or shutting down",
    504: "deadline_s passed",
    529: "The queue is full, not ready, or shutting down",
}
_STOPPED = "the engine failed, and its log says why; try again later"
_ID_RUNS = re.compile(r"a request with the id .* is running|the request id .* is in use")
_KIND = re.compile(r"\b([A-Z][A-Za-z0-9_]{0,60}(?:Error|Exception))\b")  # of an error, before what it says
_FIRST_NAME = re.compile(r"(?:unknown )?([a-z][a-z_]*(?:[.\[][\w.\[\]-]*)?)")
_TOO_LONG = re.compile(r"the prompt has \d+ tokens\b")  # clients cut their history when they read its code
_MEDIA_PLACE = re.compile(r"message (\d+)(?:, part (\d+))?")
_DECODED_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$(?:\.)?(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]*)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_D = TypeVar("_D")
_T = TypeVar("_T")


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ApiError(Exception):
    """What a caller is told. `param`: the field of the body that is wrong. `code`: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = _TYPES.get(status, "server_error")
        self.body = ErrorBody(message[:MAX_MESSAGE_CHARS], kind, param, code)

    def json(self) -> bytes:
        return msgspec.json.encode({"error": self.body})


class ClientLeft(Exception):
    """Nobody is there to be told anything."""


def api_error(error: BaseException, params: frozenset[str] = frozenset(), retry_after_s: int = 1) -> ApiError:
    """`params`: fields of the body that the message may begin with."""
    later = {"retry-after": str(max(LATER_S, retry_after_s))}
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(
                429, str(error), code="queue_full", headers={"retry-after": str(max(1, retry_after_s))}
            )
        case SessionBusy():
            headers = {"retry-after": str(max(1, retry_after_s))}
            return ApiError(409, str(error), "session_id", "session_busy", headers)
        case FetchRefused():
            return ApiError(400, str(error), media_param(str(error)), "media_not_fetched")
        case InvalidMedia():
            return ApiError(400, str(error), media_param(str(error)), "invalid_media")
        case InvalidRequest() if _ID_RUNS.match(str(error)):
            headers = {"x-should-retry": "false"}
            return ApiError(409, str(error), "request_id", "request_id_in_use", headers)
        case InvalidRequest():
            code = "context_length_exceeded" if _TOO_LONG.match(str(error)) else None
            return ApiError(400, str(error), param_of(str(error), params), code)
        case RequestFailed():
            return ApiError(500, str(error), code="request_failed")
        case ExecutorFailed():  # what a library said may hold addresses, and whatever else
            return ApiError(503, _STOPPED, code="engine_failed", headers=later)
        case KeepFailed():
            return ApiError(503, str(error), code="storage_failed", headers=later)
        case MMEngineError():
            return ApiError(503, without_details(str(error)), code="engine_failed", headers=later)
    return ApiError(
        500, f"the server failed ({type(error).__name__}); its log says more", code="internal_error"
    )


def late() -> ApiError:
    """The deadline of a request passed."""
    text = "the deadline passed before the answer was complete; raise deadline_s, or send less at once"
    return ApiError(504, text, "deadline_s", "deadline_exceeded", {"x-should-retry": "false"})


def cancelled() -> ApiError:
    """A request was given up, by somebody's wish or because nobody came for its answer."""
    return ApiError(500, "the request was cancelled", code="request_cancelled")


def failed(request_id: str, detail: str) -> ApiError:
    """A request ended with an error. What a library said of it may hold addresses and paths: the caller is
    told which kind of error it was, and under which id the log has the rest."""
    kind = _KIND.search(detail)
    text = f"request {request_id} failed{f' ({kind[1]})' if kind else ''}; the server's log says why"
    return ApiError(500, text, code="request_failed")


def without_details(reason: str) -> str:
    """Why the engine does not work, up to what a library said of it."""
    kind = _KIND.search(reason)
    return reason if kind is None else f"{reason[: kind.end()]}; the server's log says why"


def shutting_down(retry_after_s: int) -> ApiError:
    text = "the server is shutting down; send it to another one, or again later"
    return ApiError(503, text, code="shutting_down", headers={"retry-after": str(retry_after_s)})


def left_behind(request_id: str, has_log: bool, retry_after_s: int) -> ApiError:
    """The server ends before the request does."""
    fate = (
        "stays in its log, and is finished when a server goes on with that"
        if has_log
        else "is given up, for there is no log; send it again"
    )
    text = f"the server is shutting down; request {request_id} {fate}"
    return ApiError(503, text, code="shutting_down", headers={"retry-after": str(retry_after_s)})


def not_ready(reasons: tuple[str, ...], retry_after_s: int) -> ApiError:
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(503, f"not ready: {'; '.join(reasons)}", code="not_ready", headers=headers)


def not_served(name: str, names: Sequence[str]) -> ApiError:
    """A call asks for another model than the one that is here. `names`: those of that."""
    text = f"the model {name[:256]!r} is not served here; there is {', '.join(names)}"
    return ApiError(404, text, "model", "model_not_found")


def param_of(message: str, params: frozenset[str]) -> str | None:
    """The field that a message of the engine begins with."""
    found = _FIRST_NAME.match(message)
    if found is not None and re.split(r"[.\[]", found[1])[0] in params:
        return found[1].rstrip(".:")
    place = media_param(message) if "messages" in params else None
    if place is None and message.startswith("the prompt "):
        place = "messages" if "messages" in params else "prompt"
    return place


def media_param(message: str) -> str | None:
    """As messages[0].content[1], where a message of the processor says "message 0, part 1"."""
    found = _MEDIA_PLACE.search(message)
    if found is None:
        return None
    return f"messages[{found[1]}]" + (f".content[{found[2]}]" if found[2] else "")


def decoded(data: _D, decode: Callable[[_D], _T]) -> _T:
    """A body, or a value of it that was left as it came, as `decode` of msgspec reads it. Raises ApiError."""
    if isinstance(data, bytes) and has_too_many_values(data):
        text = (
            f"the body has more than {MAX_VALUES} values (commas, brackets and braces outside of texts), "
            "more than messages and tools that are taken have together; send less at once"
        )
        raise ApiError(413, text, code="request_too_large")
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _undecodable(error) from None


def _undecodable(error: Exception) -> ApiError:
    """A body that is no JSON, or has a value of another type than its field's."""
    if isinstance(error, msgspec.ValidationError) and (missing := _MISSING.fullmatch(str(error))):
        within = re.sub(r"\[\.\.\.\]", "[]", missing[2] or "")
        name = f"{within}.{missing[1]}" if within else missing[1]
        return ApiError(400, f"{name} is missing", name, "missing_required_parameter")
    found = _DECODED_PLACE.fullmatch(str(error))
    if isinstance(error, msgspec.ValidationError) and found is not None:
        what = found[1].replace("`", "")
        place = re.sub(r"\[\.\.\.\]", "[]", found[2]) or None
        return ApiError(400, f"{place or 'the body'}: {what[:1].lower()}{what[1:]}", place, "invalid_type")
    if isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body must be a JSON object with the fields of this route ({error})")
    return ApiError(400, f"the body is no valid JSON: {in_one_line(error, 120)}", code="invalid_json")

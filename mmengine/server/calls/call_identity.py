"""Recognizes repeated calls by Idempotency-Key, request id, or a digest of route and body. With each request,
the log stores an envelope, which contains the call's data.
"""

import hashlib
import re
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from mmengine.errors import ErrorCode, FieldPath
from mmengine.server.chat.parsed_request import Envelope, ParsedRequest
from mmengine.server.http.errors import ApiError

IDEMPOTENCY_KEY, ITS_ID = "Idempotency-Key", "request_id"
MAX_KEY_CHARS = 255  # Limit for an Idempotency-Key.
RETRY_HEADER = "x-stainless-retry-count"  # OpenAI's clients send the number of earlier tries.
_DIGEST_BYTES = 16
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# (owner, kind, value), where kind is IDEMPOTENCY_KEY, ITS_ID, or `RESPONSE` from detached_call.py.
Key = tuple[str, str, str]


class Caller(NamedTuple):
    """Facts that decide whether a call may get an earlier call's answer.

    `names_itself`: whether the client chose the request id. `tries_again`: whether RETRY_HEADER marks the
    call as a retry.
    """

    names_itself: bool
    tries_again: bool


def keys_of(envelope: Envelope, request_id: str, *, names_itself: bool = True) -> list[Key]:
    """Return the keys that identify repetitions of this call. `names_itself`: see Caller."""
    found = [(envelope.owner, IDEMPOTENCY_KEY, envelope.key)] if envelope.key else []
    return [*found, (envelope.owner, ITS_ID, request_id)] if names_itself else found


def tries_again(request: Request) -> bool:
    """Whether the client repeats this call after a failed try."""
    return request.headers.get(RETRY_HEADER, "0") != "0"


def key_of(request: Request) -> str:
    """Return the call's Idempotency-Key, or "". Raises ApiError."""
    key = request.headers.get(IDEMPOTENCY_KEY, "")
    if len(key) > MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        text = f"{IDEMPOTENCY_KEY} must have 1 to {MAX_KEY_CHARS} printable ASCII characters"
        raise ApiError(ErrorCode.INVALID_VALUE, text, IDEMPOTENCY_KEY)
    return key


def digest_of(request: Request, body: bytes) -> bytes:
    """Return a digest of the route and the body, the first 16 bytes of SHA-256."""
    route = request.scope["path"].encode()
    return hashlib.sha256(b"%b\0%b" % (route, body)).digest()[:_DIGEST_BYTES]


def with_identity(envelope: Envelope, request: Request, body: bytes) -> Envelope:
    """Return the envelope with the call's Idempotency-Key, digest and trace context. Raises ApiError."""
    key, digest = key_of(request), digest_of(request, body)
    trace = request.headers.get("traceparent", "")  # In W3C's Trace Context format.
    trace = trace if _TRACEPARENT.fullmatch(trace) else ""
    return msgspec.structs.replace(envelope, key=key, digest=digest, traceparent=trace)


def key_reused(key: Key) -> ApiError:
    """Return the error for a key that an earlier call used with another body."""
    what = "another body or another Idempotency-Key" if key[1] == ITS_ID else "another body"
    text = f"this {key[1]} was used before with {what}; use a new {key[1]}, or repeat the earlier call"
    return ApiError(ErrorCode.KEY_REUSED, text, key[1])


def key_in_use(key: Key) -> ApiError:
    """Return the error for a key whose earlier call is still running."""
    if key[1] == ITS_ID:
        text = f"a request with the id {key[2]!r} is running; ids must differ"
        return ApiError(ErrorCode.REQUEST_ID_IN_USE, text, FieldPath("request_id"))
    text = "a call with this Idempotency-Key is being answered on another connection"
    return ApiError(ErrorCode.KEY_IN_USE, text, key[1])


def with_first_identity(parsed_request: ParsedRequest, request_id: str, envelope: Envelope) -> ParsedRequest:
    """Return a repeated call's request without prompts, with the first call's request id and envelope."""
    parsed_request.prompts.clear()
    return msgspec.structs.replace(parsed_request, request_id=request_id, envelope=envelope)


def check_same(key: Key, mine: Envelope, theirs: Envelope) -> None:
    """Raise ApiError if this call (`mine`) differs from the earlier call with the same key (`theirs`)."""
    if mine.digest != theirs.digest or (key[1] == ITS_ID and theirs.key not in ("", mine.key)):
        raise key_reused(key)

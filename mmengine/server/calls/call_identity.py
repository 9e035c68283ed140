"""What a call says of itself beside its body: by which the same call is known when it comes again."""

import hashlib
import re
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from mmengine.errors import ErrorCode
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.http.errors import ApiError

IDEMPOTENCY_KEY, ITS_ID = "Idempotency-Key", "request_id"
MAX_KEY_CHARS = 255  # of an Idempotency-Key
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's clients: which try it is, from 0
_DIGEST_BYTES = 16
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
Key = tuple[str, str, str]  # whose, which of the two, the key


class Caller(NamedTuple):
    """`names_itself`: its request id is its caller's own. `tries_again`: it says that an earlier try of it
    broke."""

    names_itself: bool
    tries_again: bool


def keys_of(envelope: Envelope, request_id: str, *, names_itself: bool = True) -> list[Key]:
    """By which a call is known when it comes again. `names_itself`: see Caller."""
    found = [(envelope.owner, IDEMPOTENCY_KEY, envelope.key)] if envelope.key else []
    return [*found, (envelope.owner, ITS_ID, request_id)] if names_itself else found


def tries_again(request: Request) -> bool:
    """Whether it says that an earlier try of it broke."""
    return request.headers.get(RETRY_HEADER, "0") != "0"


def key_of(request: Request) -> str:
    """Its Idempotency-Key, or "". Raises ApiError."""
    key = request.headers.get(IDEMPOTENCY_KEY, "")
    if len(key) > MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        text = f"{IDEMPOTENCY_KEY} must have 1 to {MAX_KEY_CHARS} printable ASCII characters"
        raise ApiError(ErrorCode.INVALID_VALUE, text, IDEMPOTENCY_KEY)
    return key


def digest_of(request: Request, body: bytes) -> bytes:
    """By which the same body of the same route is known."""
    route = request.scope["path"].encode()
    return hashlib.sha256(b"%b\0%b" % (route, body)).digest()[:_DIGEST_BYTES]


def identified(envelope: Envelope, request: Request, body: bytes) -> Envelope:
    """With what the log keeps of how a call came. Raises ApiError."""
    key, digest = key_of(request), digest_of(request, body)
    trace = request.headers.get("traceparent", "")  # W3C's
    trace = trace if _TRACEPARENT.fullmatch(trace) else ""
    return msgspec.structs.replace(envelope, key=key, digest=digest, traceparent=trace)

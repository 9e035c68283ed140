"""Reads envelopes (server data in a log's requests): the API's name, and the ids that the client knows."""

import re

import msgspec

UNKNOWN = "unknown"
MAX_NAME_CHARS = 32  # An API's name is cut to this many characters.


class _Head(msgspec.Struct):
    api: str


class _Ids(msgspec.Struct):
    api: str = ""
    custom_id: str = ""
    key: str = ""
    traceparent: str = ""


# Prefixes for answer ids, by API (server/chat/answer_ids.py).
_PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-", "responses": "resp_", "messages": "msg_"}
OWNER = re.compile(r"[0-9a-f]{16,64}:")  # A server puts the hash of the API key before a request's id.


def api_name(envelope: bytes) -> str:
    """Return the name of the API that the client called, such as "chat". The name is "" without an envelope,
    and `UNKNOWN` if the envelope has no name.
    """
    if not envelope:
        return ""
    try:
        return msgspec.json.decode(envelope, type=_Head).api[:MAX_NAME_CHARS]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UNKNOWN


def client_ids(request_id: str, envelope: bytes) -> tuple[str, ...]:
    """Return a request's ids that its client may know: the answer's id, the custom_id of a batch line, the
    Idempotency-Key, and the trace id. Returns () without a valid envelope.
    """
    if not envelope:
        return ()
    try:
        ids = msgspec.json.decode(envelope, type=_Ids)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    owner = OWNER.match(request_id)
    own = request_id[owner.end() :] if owner else request_id
    answer = _PREFIXES[ids.api] + own if ids.api in _PREFIXES else ""
    trace = ids.traceparent.split("-")[1] if ids.traceparent.count("-") == 3 else ""
    return tuple(filter(None, (answer, ids.custom_id, ids.key, trace)))

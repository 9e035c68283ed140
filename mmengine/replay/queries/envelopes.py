"""Reads the API name and a batch line's id from the envelope that a server stores with a request."""

import msgspec

UNKNOWN = "unknown"
MAX_NAME_CHARS = 32  # Longest name shown.


class _Head(msgspec.Struct):
    api: str


class _Line(msgspec.Struct):
    custom_id: str = ""


def api_name(envelope: bytes) -> str:
    """Return the called API's name, such as "chat".

    Returns "" without an envelope, and `UNKNOWN` if the envelope has no name.
    """
    if not envelope:
        return ""
    try:
        return msgspec.json.decode(envelope, type=_Head).api[:MAX_NAME_CHARS]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UNKNOWN


def custom_id_of(envelope: bytes) -> str:
    """Return the client's id of a batch line; "" for another request, and for an unreadable envelope."""
    if b'"custom_id"' not in envelope:
        return ""
    try:
        return msgspec.json.decode(envelope, type=_Line).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""

"""Reads the API name from the envelope that a server stores with a request."""

import msgspec

UNKNOWN = "unknown"
MAX_NAME_CHARS = 32  # Longest name shown.


class _Head(msgspec.Struct):
    api: str


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

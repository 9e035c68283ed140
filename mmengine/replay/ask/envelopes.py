"""What kind of caller a request had: as a server says in the envelope that it keeps with it."""

import msgspec

UNKNOWN = "unknown"
MAX_KIND_CHARS = 32  # that are shown


class _Head(msgspec.Struct):
    api: str


def kind_of(envelope: bytes) -> str:
    """The API that was asked, as chat; "" where there is no envelope, `UNKNOWN` where it does not say."""
    if not envelope:
        return ""
    try:
        return msgspec.json.decode(envelope, type=_Head).api[:MAX_KIND_CHARS]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UNKNOWN

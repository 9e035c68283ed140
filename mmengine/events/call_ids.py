"""Derives the ids of tool calls from the ids of requests, so that a log's reader finds a call's request."""

import hashlib

ID_CHARS = 24


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return a call's id, which is the same whenever the answer is sent again."""
    text = f"{request_id}\0{choice}\0{index}".encode()
    return "call_" + hashlib.sha256(text).hexdigest()[:ID_CHARS]

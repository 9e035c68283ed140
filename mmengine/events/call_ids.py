"""Derives the ids of tool calls from request ids, so that a log's reader finds the request for a tool
call.
"""

import hashlib

ID_CHARS = 24


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call. The id is the same each time the answer is sent."""
    text = f"{request_id}\0{choice}\0{index}".encode()
    return "call_" + hashlib.sha256(text).hexdigest()[:ID_CHARS]

"""Builds the ids of answers that clients receive, such as chatcmpl-ID. An id consists of the API's prefix and
the request id.
"""

PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-", "responses": "resp_", "messages": "msg_"}


def answer_id(api: str, request_id: str) -> str:
    """Return the answer's id for a request id. `api`: a key of PREFIXES; another name has no prefix."""
    return f"{PREFIXES.get(api, '')}{request_id}"

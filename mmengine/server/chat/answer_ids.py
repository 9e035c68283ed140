"""The ids of answers as clients see them: an API's prefix, then the request's id."""

PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-", "responses": "resp_", "messages": "msg_"}


def answer_id(api: str, request_id: str) -> str:
    """Return the id that the API's answers to a request have; `api` as in the envelope."""
    return f"{PREFIXES.get(api, '')}{request_id}"

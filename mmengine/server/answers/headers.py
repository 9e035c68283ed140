"""Names and values of the HTTP headers that the server adds to a response with a generated answer. Also
checks whether a request id is valid.
"""

from typing import TYPE_CHECKING

from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.http.body_fields import ignored_header

if TYPE_CHECKING:  # OpenTelemetry is an extra.
    from mmengine.server.calls.tracing import CallSpan

MAX_ID_CHARS = 128
ID_HEADER = "x-request-id"
MESSAGE_ID_HEADER = "request-id"  # Anthropic's name for the header.
REQUEST_ID = "mmengine.request_id"  # Key for the answer's id in the ASGI scope.
UNENFORCED_HEADER = "x-mmengine-unenforced-tools"
_MAX_UNENFORCED_CHARS = 1000


def is_request_id(name: str) -> bool:
    """Whether `name` is valid as a request id. The id is sent in a header, so only printable ASCII characters
    without spaces are allowed.
    """
    return 0 < len(name) <= MAX_ID_CHARS and name.isascii() and name.isprintable() and " " not in name


def answer_headers(
    parsed_request: ParsedRequest, unenforced: tuple[str, ...], span: "CallSpan | None"
) -> dict[str, str]:
    """Return the headers of an answer's response. `unenforced`: the tools whose calls may violate the tools'
    schemas.
    """
    headers = {ID_HEADER: parsed_request.request_id}
    if parsed_request.envelope.api == "messages":
        headers[MESSAGE_ID_HEADER] = parsed_request.request_id
    if span is not None:
        headers |= span.headers
    if unenforced:
        headers[UNENFORCED_HEADER] = ", ".join(unenforced)[:_MAX_UNENFORCED_CHARS]
    return headers | ignored_header(parsed_request.ignored)

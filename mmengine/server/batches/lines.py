"""Checks and reads the lines of a batch's input file, and builds the lines of its output files, in OpenAI's
format.

An input line, and the output line with its response:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "body": {…}, …}, "error": null}
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from mmengine.errors import in_one_line
from mmengine.serve.batch.progress import RequestIndex
from mmengine.serve.batch.request_file import numbered_lines
from mmengine.serve.prompt.options import MAX_ID_CHARS
from mmengine.serve.prompt.request_lines import MAX_LINE_BYTES, custom_id_of
from mmengine.server.http.json_values import MAX_VALUES, has_too_many_values
from mmengine.server.http.media_payloads import MIN_CHARS, cut_short
from mmengine.server.storage.batches import LineError

MAX_ERRORS = 100  # Maximum number of errors that are reported for a batch.
_FIELDS = ("custom_id", "method", "url", "body")
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)


class Line(NamedTuple):
    """An input line to run. `place`: the 0-based index of the line, not counting blank lines. `number`: the
    1-based line number in the file.
    """

    place: int
    number: int
    custom_id: str
    body: bytes


class CheckedLines(NamedTuple):
    """The index of the requests in a file, and the errors in the file."""

    requests: RequestIndex
    errors: list[LineError]


def check_lines(path: Path, endpoint: str, max_lines: int) -> CheckedLines:
    """Check every line of a file. Blocks the calling thread. Raises OSError."""
    requests = index_of(path)
    if not len(requests):
        return CheckedLines(requests, [LineError("empty_file", "the file has no requests")])
    if len(requests) > max_lines:
        text = f"the file has {len(requests)} requests; the limit is {max_lines} (max_batch_lines)"
        return CheckedLines(requests, [LineError("too_many_requests", text)])
    errors: list[LineError] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in numbered_lines(file):
            error = _error(number, line, endpoint, seen)
            if error is not None:
                errors.append(error)
                if len(errors) == MAX_ERRORS:
                    break
    return CheckedLines(requests, errors)


def index_of(path: Path) -> RequestIndex:
    """Return the index of the requests in a file. Blocks the calling thread. Raises OSError."""
    return RequestIndex(path, _custom_id)


def lines_of(path: Path, index: RequestIndex, answered: set[int]) -> Iterator[Line]:
    """Yield the lines of a checked file, except the lines whose index (`Line.place`) is in `answered`. Blocks
    the calling thread. Raises OSError.
    """
    with path.open("rb") as file:
        for place, (number, line) in enumerate(numbered_lines(file)):
            if line is not None and place not in answered:
                body = _decode_body(line).body
                yield Line(place, number, index.custom_ids[place] or "", bytes(body))


class _Body(msgspec.Struct):
    body: msgspec.Raw


# Built at import: msgspec crashes if two threads are the first to use a type.
_decode_body = msgspec.json.Decoder(_Body).decode


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    """A line's fields, which are not yet decoded."""

    custom_id: msgspec.Raw | UnsetType = UNSET
    method: msgspec.Raw | UnsetType = UNSET
    url: msgspec.Raw | UnsetType = UNSET
    body: msgspec.Raw | UnsetType = UNSET


_decode_fields = msgspec.json.Decoder(_Fields).decode


def _small(line: bytes) -> bytes:
    """Return the line with large media shortened. If the line has too many values, {} replaces the body, or
    null if the body is not an object. Parsing the unchanged line could hold the GIL for too long. Raises the
    errors in _UNREADABLE.
    """
    line = cut_short(line) if len(line) > MIN_CHARS else line
    if not has_too_many_values(line):
        return line
    fields = _decode_fields(line)
    if isinstance(fields.body, msgspec.Raw):
        fields.body = msgspec.Raw(b"{}" if bytes(memoryview(fields.body)[:1]) == b"{" else b"null")
    line = msgspec.json.encode(fields)
    if has_too_many_values(line):
        raise msgspec.DecodeError(f"more than {MAX_VALUES} values")
    return line


def _custom_id(line: bytes | None) -> str | None:
    try:
        return custom_id_of(line and _small(line))
    except _UNREADABLE:
        return None


def _error(number: int, line: bytes | None, endpoint: str, seen: set[str]) -> LineError | None:
    """Return an input line's error, or None if the line is valid. The line's custom_id is added to `seen`."""
    if line is None:
        text = f"the line exceeds {MAX_LINE_BYTES} bytes; send smaller images, or upload the images as files"
        return LineError("line_too_long", text, number)
    try:
        line = _small(line)
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except _UNREADABLE as error:
        return LineError(
            "invalid_json_line", f"the line is not a JSON object ({in_one_line(error, 120)})", number
        )
    for name in _FIELDS:
        if name not in fields:
            return LineError("missing_required_parameter", f"{name} is missing", number, name)
    for name in fields:
        if name not in _FIELDS:
            return LineError("unknown_parameter", f"unknown field {name[:64]}", number, name[:64])
    custom_id = custom_id_of(line)
    if custom_id is None:
        text = f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters"
        return LineError("invalid_custom_id", text, number, "custom_id")
    if custom_id in seen:
        text = f"custom_id {custom_id[:64]!r} is also the custom_id of an earlier line; ids must be unique"
        return LineError("duplicate_custom_id", text, number, "custom_id")
    seen.add(custom_id)
    if _text(fields["method"]) != "POST":
        return LineError("invalid_method", "method must be POST", number, "method")
    if _text(fields["url"]) != endpoint:
        text = f"url must be {endpoint}, the endpoint of the batch"
        return LineError("mismatched_url", text, number, "url")
    if bytes(memoryview(fields["body"])[:1]) != b"{":
        return LineError("invalid_body", "body must be a JSON object", number, "body")
    return None


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str)
    except _UNREADABLE:
        return None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Why(msgspec.Struct):
    code: str
    message: str


class _Out(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Why | None


def answer_line(name: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the output line for a request with a response, which may be an error response. `name`: the
    request id.
    """
    return _written(_Out(_line_id(name), custom_id, _Response(status, name, msgspec.Raw(body)), None))


def expired_line(name: str, custom_id: str) -> bytes:
    """Return the error line for a request that was not finished in time."""
    why = _Why("batch_expired", "the completion window ended before this request was answered")
    return _written(_Out(_line_id(name), custom_id, None, why))


def _line_id(name: str) -> str:
    return f"batch_req_{name.removeprefix('batch_')}"


def _written(out: _Out) -> bytes:
    return msgspec.json.encode(out) + b"\n"

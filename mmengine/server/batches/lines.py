"""Lines of a batch in OpenAI's form.

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

MAX_ERRORS = 100  # of a batch that are told
_FIELDS = ("custom_id", "method", "url", "body")
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)


class Line(NamedTuple):
    """`place`: among those that are not blank, from 0. `number`: in the file, from 1."""

    place: int
    number: int
    custom_id: str
    body: bytes


class Checked(NamedTuple):
    """A file of requests, and what is wrong with it."""

    requests: RequestIndex
    errors: list[LineError]


def checked(path: Path, endpoint: str, max_lines: int) -> Checked:
    """Blocks. Raises OSError."""
    requests = index_of(path)
    if not len(requests):
        return Checked(requests, [LineError("empty_file", "the file has no requests")])
    if len(requests) > max_lines:
        text = f"the file has {len(requests)} requests; at most {max_lines} are taken (max_batch_lines)"
        return Checked(requests, [LineError("too_many_requests", text)])
    errors: list[LineError] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in numbered_lines(file):
            error = _error(number, line, endpoint, seen)
            if error is not None:
                errors.append(error)
                if len(errors) == MAX_ERRORS:
                    break
    return Checked(requests, errors)


def index_of(path: Path) -> RequestIndex:
    """Blocks. Raises OSError."""
    return RequestIndex(path, _custom_id)


def lines_of(path: Path, index: RequestIndex, answered: set[int]) -> Iterator[Line]:
    """Those of a file that was checked, but for the places that are answered; blocks. Raises OSError."""
    with path.open("rb") as file:
        for place, (number, line) in enumerate(numbered_lines(file)):
            if line is not None and place not in answered:
                body = _decode_body(line).body
                yield Line(place, number, index.custom_ids[place] or "", bytes(body))


class _Body(msgspec.Struct):
    body: msgspec.Raw


_decode_body = msgspec.json.Decoder(_Body).decode  # by one thread: two that are the first crash in it


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    """Those of _FIELDS, as they came."""

    custom_id: msgspec.Raw | UnsetType = UNSET
    method: msgspec.Raw | UnsetType = UNSET
    url: msgspec.Raw | UnsetType = UNSET
    body: msgspec.Raw | UnsetType = UNSET


def _small(line: bytes) -> bytes:
    """Without large media, or where it has many values without those of its body, over all of which a parser
    would keep the interpreter. Raises what is in _UNREADABLE."""
    line = cut_short(line) if len(line) > MIN_CHARS else line
    if not has_too_many_values(line):
        return line
    fields = msgspec.json.decode(line, type=_Fields)
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
    """What is wrong with a line. `seen`: custom_ids of those before, to which its own is added."""
    if line is None:
        text = f"the line has more than {MAX_LINE_BYTES} bytes; send smaller images, or name them by file id"
        return LineError("line_too_long", text, number)
    try:
        line = _small(line)
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except _UNREADABLE as error:
        return LineError(
            "invalid_json_line", f"the line is no JSON object ({in_one_line(error, 120)})", number
        )
    for name in _FIELDS:
        if name not in fields:
            return LineError("missing_required_parameter", f"{name} is missing", number, name)
    for name in fields:
        if name not in _FIELDS:
            return LineError("unknown_parameter", f"{name[:64]} is not known", number, name[:64])
    custom_id = custom_id_of(line)
    if custom_id is None:
        text = f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters"
        return LineError("invalid_custom_id", text, number, "custom_id")
    if custom_id in seen:
        text = f"the custom_id {custom_id[:64]!r} stands in an earlier line; ids must differ"
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
    """Of a request that was answered, also with an error. `name`: of the request."""
    return _written(_Out(_line_id(name), custom_id, _Response(status, name, msgspec.Raw(body)), None))


def expired_line(name: str, custom_id: str) -> bytes:
    """Of a request that was not, in time."""
    why = _Why("batch_expired", "this request could not be answered before the completion window was over")
    return _written(_Out(_line_id(name), custom_id, None, why))


def _line_id(name: str) -> str:
    return f"batch_req_{name.removeprefix('batch_')}"


def _written(out: _Out) -> bytes:
    return msgspec.json.encode(out) + b"\n"

"""Parses and encodes the JSON lines in request files and answer files.

The custom_id is read even from invalid JSON, so that the line with the error can name the request.
"""

import json
import re
from typing import Any

import msgspec

from mmengine.errors import InvalidRequest
from mmengine.serve.prompt.options import MAX_ID_CHARS

MAX_LINE_BYTES = 32 * 2**20  # maximum length of a request line; enough for a few large images in base64
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FIRST_FIELD = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*+")')


class LineHead(msgspec.Struct):
    """The fields in an answer line that identify its request."""

    custom_id: object = None
    error: object = None
    line: object = None  # the request's line number, if the custom_id is missing or not unique


def read_head(line: bytes) -> LineHead:
    """Return a line's identifying fields. Unreadable fields are None. Escapes for unpaired surrogates are
    accepted, although msgspec refuses them. In invalid JSON, a custom_id is read only if it is the first
    field.
    """
    try:
        return msgspec.json.decode(line, type=LineHead)
    except _UNREADABLE:
        pass
    try:
        fields = json.loads(line)
        if isinstance(fields, dict):
            return LineHead(fields.get("custom_id"), fields.get("error"), fields.get("line"))
    except (ValueError, RecursionError):
        pass
    found = _FIRST_FIELD.match(line)
    try:
        return LineHead(json.loads(found[1])) if found is not None else LineHead()
    except ValueError:
        return LineHead()


def custom_id_of(line: bytes | None) -> str | None:
    """Return a request line's custom_id, or None if the line has no usable custom_id."""
    name = read_head(line or b"").custom_id
    return name if isinstance(name, str) and 1 <= len(name) <= MAX_ID_CHARS else None


def parse_fields(line: bytes | None) -> dict[str, Any]:
    """Return a request line's fields. Raises InvalidRequest."""
    if line is None:
        raise InvalidRequest(f"longer than {MAX_LINE_BYTES // 2**20} MiB; name large media by their path")
    try:
        fields = msgspec.json.decode(line)
    except UnicodeDecodeError:
        raise InvalidRequest("not valid JSON (not UTF-8); write the file in UTF-8") from None
    except RecursionError:
        raise InvalidRequest("not valid JSON (arrays and objects are nested too deep)") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(_surrogate(line) or f"not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("a request must be a JSON object")
    return fields


def encode_line(fields: dict[str, object]) -> bytes:
    """Return `fields` as a JSON line with a newline, in a form that `read_head` can read."""
    try:
        return msgspec.json.encode(fields) + b"\n"
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON can only express as an escape
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _surrogate(line: bytes) -> str:
    """Return an error message for a line that is invalid only because of an unpaired surrogate, else ""."""
    try:
        waiting: list[tuple[str, object]] = [("", json.loads(line))]
    except (ValueError, RecursionError):
        return ""
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, str):
            half = next((each for each in value if "\ud800" <= each <= "\udfff"), None)
            if half is not None:
                return (
                    f"{where or 'the line'} holds an unpaired surrogate (\\u{ord(half):x}), which is not a "
                    "character; write both halves of the surrogate pair, or leave the half out"
                )
        elif isinstance(value, list):
            waiting += ((f"{where}[{number}]", each) for number, each in enumerate(value))
        elif isinstance(value, dict):
            waiting += (("a field name", name) for name in value)
            waiting += ((f"{where}.{name}" if where else name, each) for name, each in value.items())
    return ""

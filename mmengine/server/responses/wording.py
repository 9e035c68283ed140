"""Responses are asked in the words of chat. What is wrong with one is told in those of its own body."""

import re
from collections.abc import Sequence

from mmengine.server.errors import ApiError

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")
_MEDIUM = re.compile(r"\bmessage (\d+)(?:, part (\d+))?")
_WORDS = (
    (re.compile(r"\btool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice(?:\.tools\[\d+\])?)\.function\b"), r"\1"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
)


def reworded(error: ApiError, places: Sequence[str]) -> ApiError:
    """`places`: of the body, one for each message that was made of it."""
    param = error.body.param
    return ApiError(
        error.status,
        _reworded(error.body.message, places),
        None if param is None else _reworded(param, places),
        error.body.code,
        error.headers,
    )


def upload_place(where: str, places: Sequence[str]) -> str:
    """The field that names an uploaded image, of which chat says that it is its image_url."""
    return f"{_reworded(where, places).removesuffix('image_url')}file_id"


def _reworded(text: str, places: Sequence[str]) -> str:
    def place(found: re.Match[str]) -> str:
        number = int(found[1])
        if number >= len(places):
            return found[0]
        part = found[2] if found.re is _MEDIUM else None
        return places[number] if part is None else f"{places[number]}.content[{part}]"

    text = _MEDIUM.sub(place, _MESSAGE.sub(place, text))
    for pattern, word in _WORDS:
        text = pattern.sub(word, text)
    return text

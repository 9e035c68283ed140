"""Reads a JSON lines file whose inputs are to be embedded."""

import codecs
from pathlib import Path
from typing import NamedTuple

import msgspec

from mmengine.errors import InvalidRequest, shown
from mmengine.processing.media.data_urls import is_data_url
from mmengine.serve.pooling.prompts import PoolInput

MAX_LINE_BYTES = 64 * 2**20
_LOCAL = ("image", "video")


class VectorInput(NamedTuple):
    """An input, and the id under which the input's vector is written."""

    custom_id: str
    content: PoolInput


def read_inputs(path: Path) -> list[VectorInput]:
    """Return the inputs in a JSON lines file. Raises InvalidRequest, whose message names the line.

    A line is a string or an object. An object has either `messages`, or `text`, `image` and `video` in any
    combination. It may also have a `custom_id` (default: the line's number, from 1). Paths are relative to
    the file's folder.
    """
    found: list[VectorInput] = []
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidRequest(f"{path}: line {number} has more than {MAX_LINE_BYTES:,} bytes")
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    found.append(_read_line(line, number, path))
                    if found[-1].custom_id in seen:
                        raise InvalidRequest(
                            f"{path}: line {number} repeats the custom_id {shown(found[-1].custom_id)}"
                        )
                    seen.add(found[-1].custom_id)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    return found


def _read_line(line: bytes, number: int, path: Path) -> VectorInput:
    try:
        value = msgspec.json.decode(line, type=str | dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path}: line {number} is not a JSON string or object: {error}") from None
    if isinstance(value, str):
        return VectorInput(str(number), value)
    custom_id = value.pop("custom_id", str(number))
    if not isinstance(custom_id, str):
        raise InvalidRequest(f"{path}: line {number}: custom_id must be a string, not {shown(custom_id)}")
    if "messages" in value:
        if len(value) > 1 or not isinstance(value["messages"], list):
            raise InvalidRequest(f"{path}: line {number}: messages must be a list, and the only field")
        return VectorInput(custom_id, value["messages"])
    for kind in _LOCAL:
        place = value.get(kind)
        if isinstance(place, str) and "://" not in place and not is_data_url(place):
            value[kind] = str(path.parent / place)
    return VectorInput(custom_id, value)

"""Reads lines and JSON from untrusted workload files within size limits. An error names the line that is
wrong.
"""

import codecs
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mmengine.decode_errors import utf16_hint
from mmengine.errors import InvalidRequest

MAX_TOKENS = 2**24  # maximum number of tokens in one prompt or one output
MAX_LINE_BYTES = 2**24
MAX_FILE_BYTES = 2**30
MAX_LINES = 2**20

T = TypeVar("T")


def existing(path: Path) -> Path:
    """Return `path` if the file exists and is small enough. Raises InvalidRequest otherwise."""
    if not path.is_file():
        raise InvalidRequest(f"there is no file {path}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} has more than {MAX_FILE_BYTES} bytes; split it")
    return path


def lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield at most `limit` lines that are not blank, as (line number from 1, line).

    Raises InvalidRequest for a line that is too long. Without `limit`, a file with too many lines raises
    InvalidRequest as well.
    """
    count = number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidRequest(f"{path}, line {number} is longer than {MAX_LINE_BYTES} bytes")
                if not line.strip():
                    continue
                if count == (MAX_LINES if limit is None else limit):
                    if limit is None:
                        raise InvalidRequest(
                            f"{path} has more than {MAX_LINES} lines; limit them with --limit"
                        )
                    return
                count += 1
                yield number, line
        except (gzip.BadGzipFile, EOFError) as error:
            raise InvalidRequest(f"{path} is not a complete gzip file: {error}") from None


def decode(data: bytes, kind: type[T] | msgspec.json.Decoder[T], where: str) -> T:
    """Decode JSON as `kind`. Raises InvalidRequest with the mistake and `where` (file and line)."""
    try:
        if isinstance(kind, msgspec.json.Decoder):
            return kind.decode(data)
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {utf16_hint(data) or error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read one JSON object, such as a settings file."""
    return decode(existing(path).read_bytes().removeprefix(codecs.BOM_UTF8), dict[str, Any], str(path))

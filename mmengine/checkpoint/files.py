"""Reads JSON files, and byte ranges of any file, from an untrusted model folder."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from mmengine.errors import ModelError

# With O_NONBLOCK, opening a named pipe does not wait for a writer.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
MAX_JSON_BYTES = 64 * 2**20  # A tokenizer with 250,000 entries needs 12 MB.


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, and never reads from a pipe or a device."""
    file = os.fdopen(os.open(path, _READ), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_range(path: Path, start: int, num_bytes: int, what: str) -> bytes:
    """Return `num_bytes` bytes of a file, starting at offset `start`. Raises ModelError if the file cannot be
    read or is too short. `what` names the data in the error.
    """
    try:
        with open_regular(path) as file:
            file.seek(start)
            data = file.read(num_bytes)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) != num_bytes:
        raise ModelError(f"{path}: {what} is cut short; download the file again")
    return data


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ModelError if the file is missing, too large or damaged, or
    does not contain an object.
    """
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise ModelError(f"{path} is larger than {max_bytes} bytes, the limit for such a file")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value

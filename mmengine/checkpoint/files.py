"""Reading the small files of a model folder, which may come from anybody."""

import json
from pathlib import Path
from typing import Any

from mmengine.errors import ModelError

MAX_JSON_BYTES = 64 * 2**20  # a tokenizer of 250,000 entries needs 12 MB


def read_range(path: Path, start: int, num_bytes: int, what: str) -> bytes:
    """Bytes of a file that its header told of. ModelError when they cannot be read, or are not there any
    more; `what` they are."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(num_bytes)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) != num_bytes:
        raise ModelError(f"{path}: {what} was cut short while it was read; download the file again")
    return data


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`. ModelError when it is missing, too large, broken, or no object."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise ModelError(f"{path} is larger than {max_bytes} bytes, too large for a file of its kind")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value

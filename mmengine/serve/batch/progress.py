"""Tracks a batch's progress: a restarted batch skips requests that already have a line in the answer file.

An answer line names its request by the `custom_id`. If the custom_id is null or not unique, the field `line`
gives the request's line number. An incomplete last line is removed. `batch.json` in the log's folder
identifies the log's request file.
"""

import copy
import errno
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mmengine.errors import InvalidRequest, LogError
from mmengine.events.file_system import sync_data, write_whole
from mmengine.events.segment import segment_paths
from mmengine.serve.batch.request_file import WHOLE_FILE, Shard, numbered_lines
from mmengine.serve.prompt.request_lines import custom_id_of, read_head

MANIFEST = "batch.json"
SYNC_INTERVAL_S = 0.1
MAX_MANIFEST_BYTES = 2**20  # maximum size of `batch.json` in bytes


class _Manifest(msgspec.Struct):
    sha256: str
    num_lines: int


class RequestIndex:
    """Indexes the non-blank lines in a request file's shard, and hashes the whole file.

    `numbers` has each line's number in the file, from 1. `custom_ids` has None for a line without a
    custom_id. The argument `custom_id` is a function that reads a line's custom_id.
    """

    def __init__(
        self,
        path: Path,
        custom_id: Callable[[bytes | None], str | None] = custom_id_of,
        shard: Shard = WHOLE_FILE,
    ):
        self.path, self.shard = path, shard
        self.numbers: list[int] = []
        self.custom_ids: list[str | None] = []
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for place, (number, line) in enumerate(numbered_lines(_Hashing(file, digest))):
                if shard.has(place):
                    self.numbers.append(number)
                    self.custom_ids.append(custom_id(line))
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, shard: Shard) -> "RequestIndex":
        """Return a shard's index, without reading the file again. `self` must index the whole file."""
        part = copy.copy(self)
        part.shard = shard
        part.numbers = self.numbers[shard.index :: shard.count]
        part.custom_ids = self.custom_ids[shard.index :: shard.count]
        return part

    def wanted(self, answered: set[int]) -> Callable[[str], bool]:
        """Return a function that takes a request's id in the engine and returns whether its answer is still
        needed.
        """
        missing = {name for place, name in enumerate(self.custom_ids) if place not in answered}
        return lambda core_id: core_id in missing or core_id.rpartition("/")[0] in missing

    def begin(self, log: Path) -> None:
        """Write `batch.json` into a new log's folder, to identify the request file."""
        manifest = _Manifest(self.sha256, len(self))
        write_whole(log / MANIFEST, msgspec.json.encode(manifest))

    def is_begun(self, log: Path) -> bool:
        """Return whether the folder `log` has this batch's log.

        Raises LogError if the log belongs to another request file.
        """
        if not log.is_dir() or not segment_paths(log):
            return False
        try:
            with (log / MANIFEST).open("rb") as file:
                manifest = msgspec.json.decode(file.read(MAX_MANIFEST_BYTES), type=_Manifest)
        except FileNotFoundError:
            raise LogError(
                f"{log} holds a log that is not a batch's: name another folder, or move the log away"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise LogError(f"{log / MANIFEST} cannot be read: {error}") from None
        if manifest.sha256 != self.sha256:
            raise LogError(
                f"the log in {log} belongs to a request file with "
                f"{manifest.num_lines} requests and the SHA-256 {manifest.sha256[:12]}, but {self.path} has "
                f"{len(self)} and {self.sha256[:12]}. Restore the first file, or name another --log and --out"
            )
        return True


class _Hashing:
    """Wraps a file and hashes each line that is read."""

    def __init__(self, file: BinaryIO, digest: Any):
        self._file, self._digest = file, digest

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        self._digest.update(line)
        return line


class AnswerFile:
    """Appends answers to the answer file. An answer counts as delivered after a sync to the disk.

    With `fresh`, the file is emptied because its contents belong to an earlier run. Otherwise only an
    incomplete last line is removed. Raises InvalidRequest for a file that does not belong to this batch.
    """

    def __init__(self, path: Path, index: RequestIndex, *, fresh: bool):
        self.path = path
        # Unbuffered, because a buffer would keep bytes that a full disk has refused, and write them later.
        is_new = fresh or not path.exists()
        self._file = path.open("w+b", buffering=0) if is_new else path.open("r+b", buffering=0)
        self.answered: set[int] = set()  # indices of the requests that the file answered when it was opened
        self._written: list[str] = []  # requests whose answers were written since the last sync
        self._synced_at = 0.0
        try:
            self._end = 0
            if not fresh:
                reader = io.BufferedReader(self._file)
                self.answered, self._end = _read_answers(reader, path, index)
                reader.detach()
            self._cut()
        except BaseException:
            self._file.close()
            raise

    def write(self, line: bytes, request_id: str) -> None:
        """Append an answer line. `request_id` is empty if the request was never submitted.

        If writing raises an OSError, the file still ends with a complete line, and the caller may retry.
        """
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            self._cut()
            raise
        self._end += len(line)
        if request_id:
            self._written.append(request_id)

    def delivered(self, *, now: bool = False) -> list[str]:
        """Return the request ids whose answers have reached the disk since the last call.

        The file is synced a few times a second, or immediately with `now`.
        """
        if not self._written or not (now or time.monotonic() - self._synced_at > SYNC_INTERVAL_S):
            return []
        sync_data(self._file.fileno())
        self._synced_at = time.monotonic()
        written, self._written = self._written, []
        return written

    def check_place(self) -> None:
        """Raise FileNotFoundError if the file at `path` was deleted or replaced."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                return
        text = "the answer file was removed or replaced; run the command again to write the answers"
        raise FileNotFoundError(errno.ENOENT, text, str(self.path))

    def _cut(self) -> None:
        """Remove everything after the last complete line."""
        self._file.seek(self._end)
        self._file.truncate()

    def close(self) -> None:
        self._file.close()


def answered_in(path: Path, index: RequestIndex) -> set[int]:
    """Return the indices of the requests that the file answers. Raises InvalidRequest.

    The file is not changed.
    """
    if not path.exists():
        return set()
    with path.open("rb") as file:
        return _read_answers(file, path, index)[0]


def num_errors(path: Path) -> int:
    """Return how many answer lines report an error. Raises OSError."""
    with path.open("rb") as file:
        return sum(read_head(line).error is not None for line in file)


def _read_answers(file: BinaryIO, path: Path, index: RequestIndex) -> tuple[set[int], int]:
    """Return the answered requests' indices, and the byte offset at which the last complete line ends."""
    places = {number: place for place, number in enumerate(index.numbers)}
    owners: dict[str, list[int]] = {}
    for place, name in enumerate(index.custom_ids):
        if name is not None:
            owners.setdefault(name, []).append(place)
    answered: set[int] = set()
    end = 0
    for number, line in enumerate(_whole_lines(file), 1):
        owner = _owner(line, owners, places)
        if owner is None or owner in answered:
            what = (
                "does not answer a request of this batch"
                if owner is None
                else "answers a request that an earlier line answers"
            )
            raise InvalidRequest(f"{path}, line {number}, {what}; move the file away, or name another --out")
        answered.add(owner)
        end += len(line)
    return answered, end


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    for line in file:
        if not line.endswith(b"\n"):
            return  # the process ended while writing this line
        yield line


def _owner(line: bytes, owners: dict[str, list[int]], places: dict[int, int]) -> int | None:
    """Return the answered request's index, or None if the line answers no request in the shard."""
    head = read_head(line)
    named = owners.get(head.custom_id, []) if isinstance(head.custom_id, str) else []
    if len(named) == 1:
        return named[0]
    place = places.get(head.line) if isinstance(head.line, int) else None
    if head.custom_id is None or place in named:
        return place
    return named[0] if named else None

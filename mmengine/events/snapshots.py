"""Snapshots as files beside a log: snapshot-00000000000000012345.mmsnap holds the state behind that
record. Each is written whole under another name first, so that one with that name is whole."""

import os
from contextlib import suppress
from pathlib import Path

from mmengine.errors import CorruptLog, LogError
from mmengine.events.files import open_file, write_whole

SUFFIX = ".mmsnap"
MAX_BYTES = 2**33


class SnapshotFolder:
    """Of the log's writer: one each time the log grew by `every_bytes`. A disk that refuses one costs
    nothing else."""

    def __init__(self, folder: Path, every_bytes: int):
        self._folder, self._every_bytes = folder, every_bytes
        self._next_at = every_bytes
        for part in folder.glob(f"snapshot-*{SUFFIX}.part"):  # of a process that was killed
            part.unlink(missing_ok=True)

    def is_due(self, num_bytes: int) -> bool:
        """`num_bytes`: what was appended to the log so far."""
        return num_bytes >= self._next_at

    def write(self, sequence: int, data: bytes, num_bytes: int) -> None:
        self._next_at = num_bytes + self._every_bytes
        with suppress(OSError):
            write_whole(snapshot_path(self._folder, sequence), data)


def drop_behind(folder: Path, sequence: int) -> None:
    """Let snapshots go that hold record `sequence` or later ones: the log is about to have others there.
    Raises OSError."""
    for path in folder.glob(f"snapshot-*{SUFFIX}"):
        name = path.stem.removeprefix("snapshot-")
        if name.isdecimal() and int(name) >= sequence:
            path.unlink(missing_ok=True)


def snapshot_path(folder: Path, sequence: int) -> Path:
    return folder / f"snapshot-{sequence:020d}{SUFFIX}"


def read_snapshot(folder: Path, sequence: int) -> bytes:
    """Raises LogError when it cannot be read, CorruptLog for a size that no snapshot has."""
    path = snapshot_path(folder, sequence)
    try:
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise CorruptLog(f"{path.name} is larger than any snapshot ({MAX_BYTES} bytes)")
    return data

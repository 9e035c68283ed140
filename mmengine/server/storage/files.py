"""Stores uploaded files and batch files: the bytes in a folder, and the metadata in the database.

A file's database row is inserted after the file's bytes are written, and deleted before the bytes are
deleted. After a crash, the next start deletes files without rows and rows without files.
"""

import asyncio
import os
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from mmengine.errors import ConfigError, ErrorCode, InvalidRequest, KeepFailed, QueueFull
from mmengine.events.file_system import open_file, sync_data, sync_folder
from mmengine.server.storage.database import Database
from mmengine.server.storage.list_positions import ListPositions

MAX_FILES = 20_000  # Maximum number of files from all owners, including batch files.
MAX_SHOWN = 10_000  # Maximum number of files in a list.
PART = ".part"


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file's metadata. `created` and `expires_at` are Unix times in seconds. A file with `expires_at` 0
    never expires.
    """

    file_id: str
    owner: str
    num_bytes: int
    created: int
    filename: str
    purpose: str
    expires_at: int = 0


class FileLimits(NamedTuple):
    """Limits in bytes: for a single file, for all files, and for each owner's files."""

    max_file_bytes: int
    max_bytes: int
    max_owner_bytes: int


class Files:
    """The files of all owners. An owner is the beginning of an API key's hash.

    `spared`: ids of live batches' unfinished files, which have no rows yet and must not be deleted. Raises
    ConfigError if the folder cannot be used.
    """

    def __init__(
        self,
        database: Database,
        limits: FileLimits,
        spared: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ):
        self._database, self.limits, self.clock = database, limits, clock
        self.folder = database.folder / "files"
        self._files: dict[str, StoredFile] = {}  # Maps an id to the file, in creation order.
        self._owners: dict[str, dict[str, StoredFile]] = {}
        self.places = ListPositions()
        self._lock = threading.Lock()  # Guards `_taken`.
        # Maps an owner to the size of its files in bytes, including uploads in progress.
        self._taken: Counter[str] = Counter()
        self.threads = ThreadPoolExecutor(2, "mmengine-files")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            there = {path.name for path in self.folder.iterdir()}
            for file in database.now(lambda connection: _rows(connection, there)):
                self._add(file)
            for name in there.difference(self._files, spared):
                self.path(name).unlink()
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot store files ({error.strerror})") from None

    def _add(self, file: StoredFile) -> None:
        with self._lock:
            self._taken[file.owner] += file.num_bytes
        self._files[file.file_id] = file
        self.places.add(file.file_id, file.owner)
        self._owners.setdefault(file.owner, {})[file.file_id] = file

    def get(self, file_id: str, owner: str) -> StoredFile | None:
        """Return the file, or None if no such file exists, or if it has another owner or has expired."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner or (file.expires_at and file.expires_at <= self.clock()):
            return None
        return file

    def path(self, file_id: str) -> Path:
        return self.folder / file_id

    def of_owner(self, owner: str) -> list[StoredFile]:
        """Return the owner's files, oldest first."""
        now = self.clock()
        found = list(self._owners.get(owner, {}).values())
        return [file for file in found if not file.expires_at or file.expires_at > now]

    def read(self, file: StoredFile) -> bytes:
        """Return a file's bytes. Blocks. Raises KeepFailed."""
        try:
            return self.path(file.file_id).read_bytes()
        except OSError as error:
            raise _failed(error) from None

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes, including uploads in progress."""
        return self._taken.total()

    def incoming(self, owner: str) -> "IncomingFile":
        """Return a new file for writing. Raises QueueFull if MAX_FILES files exist."""
        if len(self._files) >= MAX_FILES:
            raise QueueFull(
                f"the server stores {MAX_FILES} files, which is the limit; delete some files first"
            )
        return IncomingFile(self, f"file-{secrets.token_hex(12)}", owner)

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserve bytes for an upload, or release bytes if `num_bytes` is negative. Thread-safe. Raises
        QueueFull if a limit would be exceeded.
        """
        with self._lock:
            total = self._taken.total() + num_bytes
            if num_bytes > 0 and self._taken[owner] + num_bytes > self.limits.max_owner_bytes:
                raise QueueFull(
                    f"the files of this API key would exceed {self.limits.max_owner_bytes} bytes "
                    "(files_bytes, key_share); delete some files first"
                )
            if num_bytes > 0 and total > self.limits.max_bytes:
                raise QueueFull(
                    f"all files would exceed {self.limits.max_bytes} bytes (files_bytes); delete some files "
                    "first"
                )
            self._taken[owner] += num_bytes

    async def add(
        self, incoming: "IncomingFile", filename: str, purpose: str, expires_s: int = 0
    ) -> StoredFile:
        """Insert a finished file's row, and return the file's metadata. Raises KeepFailed."""
        now = int(self.clock())
        expires_at = now + expires_s if expires_s else 0
        file = StoredFile(
            incoming.file_id, incoming.owner, incoming.num_bytes, now, filename, purpose, expires_at
        )
        await self._database.write(lambda connection: insert(connection, file))
        self._add(file)
        return file

    async def delete(self, file_id: str, owner: str) -> bool:
        """Delete a file's metadata and bytes, and return whether the file existed."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            return False
        await self._database.write(lambda connection: _delete(connection, file_id))
        if self._files.pop(file_id, None) is None:
            return False  # A concurrent call has already deleted the file.
        self.places.remove(file_id)
        self._owners[owner].pop(file_id)
        with self._lock:
            self._taken[owner] -= file.num_bytes
        if not self._owners[owner]:
            del self._owners[owner]
        # Deleting a large file takes 0.1 s, so a thread deletes the file.
        await asyncio.get_running_loop().run_in_executor(self.threads, _remove, self.path(file_id))
        return True

    def added(self, file: StoredFile) -> None:
        """Add a file whose row is already in the database."""
        if file.file_id not in self._files:
            self._add(file)

    async def sweep(self, used: Collection[str]) -> None:
        """Delete expired files whose ids are not in `used`."""
        now = self.clock()
        over = [each for each in list(self._files.values()) if each.expires_at and each.expires_at <= now]
        for file in over:
            if file.file_id not in used:
                await self.delete(file.file_id, file.owner)

    def close(self) -> None:
        self.threads.shutdown()


class IncomingFile:
    """A file during an upload. All methods block. The caller must call `discard` if the file is not added."""

    def __init__(self, files: Files, file_id: str, owner: str):
        self._files, self.file_id, self.owner = files, file_id, owner
        self.num_bytes = self._reserved = 0
        self._part = files.path(file_id + PART)
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        """Append bytes. Raises FileTooLarge, QueueFull, KeepFailed."""
        limit = self._files.limits.max_file_bytes
        if self.num_bytes + len(data) > limit:
            raise FileTooLarge(
                f"the file exceeds {limit} bytes (max_file_bytes); split the file into smaller files"
            )
        self._files.reserve(self.owner, len(data))
        self._reserved += len(data)
        try:
            if self._file is None:
                self._file = os.fdopen(open_file(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")
            self._file.write(data)
        except OSError as error:
            raise _failed(error) from None
        self.num_bytes += len(data)

    def finish(self) -> None:
        """Sync the file to the disk, and give it its final name. Raises KeepFailed."""
        self.write(b"")
        assert self._file is not None
        try:
            self._file.flush()
            sync_data(self._file.fileno())
            self._file.close()
            self._part.replace(self._files.path(self.file_id))
            sync_folder(self._files.folder)
        except OSError as error:
            raise _failed(error) from None

    def release(self) -> None:
        """Release the reserved bytes. Call this method after `Files.add`, which counts the bytes separately
        from the reservation. `discard` also calls this method.
        """
        reserved, self._reserved = self._reserved, 0
        self._files.reserve(self.owner, -reserved)

    def discard(self) -> None:
        """Delete the file and release its reserved bytes."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        for path in (self._part, self._files.path(self.file_id)):
            _remove(path)
        self.release()


class FileTooLarge(InvalidRequest):
    """Raised if a file is larger than max_file_bytes."""

    code = ErrorCode.FILE_TOO_LARGE


def _rows(connection: sqlite3.Connection, there: Collection[str]) -> list[StoredFile]:
    """Return the stored files in creation order. Deletes rows without a file. `there`: names in the files'
    folder.
    """
    rows = connection.execute("SELECT state FROM files ORDER BY number").fetchall()
    found = [msgspec.json.decode(state, type=StoredFile) for (state,) in rows]
    for file in found:
        if file.file_id not in there:
            _delete(connection, file.file_id)
    return [file for file in found if file.file_id in there]


def insert(connection: sqlite3.Connection, file: StoredFile) -> None:
    """Insert a file's row if the row does not exist yet."""
    connection.execute(
        "INSERT OR IGNORE INTO files(id, state) VALUES (?, ?)", (file.file_id, msgspec.json.encode(file))
    )


def _delete(connection: sqlite3.Connection, file_id: str) -> None:
    connection.execute("DELETE FROM files WHERE id=?", (file_id,))


def _remove(path: Path) -> None:
    with suppress(OSError):  # The next start tries again.
        path.unlink()


def _failed(error: OSError) -> KeepFailed:
    return KeepFailed(f"files cannot be written or read ({error.strerror}); try again later")

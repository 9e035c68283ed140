"""The SQLite database next to a log, with a thread for writes and a thread for reads. Only one process can
open the database.

A write completes when it is durable on disk. Writes that wait at the same time share a commit.
"""

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from mmengine.errors import ConfigError, KeepFailed, LogError, MMEngineError, in_one_line
from mmengine.events.file_system import open_file
from mmengine.events.lock import lock
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.storage.tables import TABLES, UPGRADE_FROM_1

NAME = "answers.db"
# Version of the tables. In version 1, there were no idempotency keys, and triggers counted inserted rows.
VERSION = 2
MAX_TOGETHER = 256  # Maximum number of writes per commit.
MAX_CHECKED_BYTES = 64 * 2**20  # Maximum size of a database that is checked when it is opened.
VACUUMED_PAGES = 1024  # Maximum number of pages that a scrub returns to the file system.
BUSY_S = 5.0  # Seconds that a checkpoint waits for readers.
# SQLite's primary result codes for a full or failing disk. The primary code is the low byte of an error code.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


_R = TypeVar("_R")
Job = Callable[[sqlite3.Connection], _R]
Fault = Callable[[str], None]


def no_fault(place: str) -> None:
    """Do nothing. This is the default fault function; tests pass functions that fail or exit."""


class _Write(NamedTuple):
    run: Callable[[sqlite3.Connection], None]
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"
    scrub: bool

    def tell(self, error: MMEngineError | None) -> None:
        """Complete the caller's future. Runs on the caller's event loop."""
        if self.done.done():  # The caller no longer waits.
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Database:
    """The connections and threads for an SQLite database.

    `fault` is called before and after each commit, on the writing thread. Raises ConfigError if another
    process has the database open, if the database is damaged or was written by a newer mmengine, or if the
    folder is not writable.
    """

    def __init__(self, folder: Path, fault: Fault = no_fault):
        self.folder, self.fault = folder, fault
        self._path = folder / NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock(folder)
        except LogError:
            raise ConfigError(
                f"another process stores answers in {folder}; stop that process, or use another --log"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot store answers ({error.strerror}); check its permissions"
            ) from None
        try:
            self._writing = self._opened()
            self._reading = self._connected()
        except BaseException:
            os.close(self._lock)
            raise
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mmengine-keep", daemon=True)
        self._thread.start()
        self._reader = ThreadPoolExecutor(1, "mmengine-keep-read")
        self._closed = False

    def _opened(self) -> sqlite3.Connection:
        try:
            os.close(open_file(self._path, os.O_RDWR | os.O_CREAT))
            connection = self._connected()
            try:
                _prepare(connection, self._path)
            except BaseException:
                connection.close()
                raise
            return connection
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _FULL:
                raise ConfigError(
                    f"{self._path} cannot be written ({error}); make room on the disk"
                ) from None
            raise ConfigError(
                f"{self._path} is damaged ({in_one_line(error)}); move the file away to start with an empty "
                "store"
            ) from None
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be opened ({error.strerror})") from None

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, BUSY_S, isolation_level=None, check_same_thread=False)
        connection.executescript("PRAGMA foreign_keys=ON; PRAGMA secure_delete=ON; PRAGMA synchronous=FULL;")
        return connection

    def now(self, job: Job[_R]) -> _R:
        """Run `job` on the calling thread and commit. May only be called before the first `write`. Raises
        ConfigError.
        """
        try:
            with _transaction(self._reading):
                return job(self._reading)
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{self._path} cannot be read or written ({in_one_line(error)})") from None

    async def write(self, job: Job[_R], *, scrub: bool = False) -> _R:
        """Run `job` on the writing thread. Return the job's result when the job's changes are durable on
        disk.

        `scrub`: also erase deleted bytes from the database's files. Raises KeepFailed, and any MMEngineError
        that `job` raises. After an error, `job`'s changes are rolled back.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        results: list[_R] = []
        if self._closed:
            raise KeepFailed("the server is shutting down and stores nothing more; try again later")
        self._queue.put(_Write(lambda connection: results.append(job(connection)), loop, done, scrub))
        await done
        return results[0]

    async def read(self, job: Job[_R]) -> _R:
        """Run `job` on the reading thread, and return its result. `job` sees all completed writes. Raises
        KeepFailed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, job, self._reading)
        except sqlite3.DatabaseError as error:
            raise _to_storage_error(error) from None

    def close(self) -> None:
        """Finish waiting writes and close the database. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._reader.shutdown()
        self._reading.close()
        with suppress(sqlite3.DatabaseError):
            self._writing.close()
        os.close(self._lock)

    # All methods below run on the writing thread.

    def _run(self) -> None:
        while self._turn():
            # The loop body is a separate method, so that its local variables do not keep the last writes in
            # memory.
            pass

    def _turn(self) -> bool:
        """Wait for writes and commit them together. Return False after `close`."""
        found = [self._queue.get()]
        while len(found) < MAX_TOGETHER and not self._queue.empty():
            found.append(self._queue.get())
        writes = [each for each in found if each is not None]
        if writes:
            self._commit(writes)
        return None not in found

    def _commit(self, writes: list[_Write]) -> None:
        try:
            errors = self._written(writes)
        except Exception as failure:  # After any failure, the waiting callers must get a result.
            operator_log.error("answers cannot be stored", reason=in_one_line(failure))
            errors = [_to_storage_error(failure)] * len(writes)
        if any(write.scrub for write in writes) and (failed := self._scrub()) is not None:
            errors = [
                error or (failed if write.scrub else None)
                for write, error in zip(writes, errors, strict=True)
            ]
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Write, MMEngineError | None]]] = {}
        for write, error in zip(writes, errors, strict=True):
            loops.setdefault(write.loop, []).append((write, error))
        for loop, some in loops.items():
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(_tell_all, some)

    def _written(self, writes: list[_Write]) -> list[MMEngineError | None]:
        """Run the writes in a single transaction. Return an error or None for each write. If the commit
        raises, nothing is written.
        """
        connection, errors = self._writing, list[MMEngineError | None]()
        with _transaction(connection):
            for write in writes:
                connection.execute("SAVEPOINT one")
                try:
                    write.run(connection)
                    errors.append(None)
                except (sqlite3.DatabaseError, MMEngineError) as error:
                    # If the disk is full, SQLite may have rolled back the whole transaction.
                    if not connection.in_transaction:
                        raise
                    errors.append(_to_storage_error(error))
                    connection.execute("ROLLBACK TO one")
                connection.execute("RELEASE one")
            self.fault("before commit")
        self.fault("after commit")
        return errors

    def _scrub(self) -> MMEngineError | None:
        """Return freed pages to the file system, and truncate SQLite's write-ahead log, which may contain
        deleted bytes.
        """
        try:
            self._writing.execute(f"PRAGMA incremental_vacuum({VACUUMED_PAGES})").fetchall()
            busy, _, _ = self._writing.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.DatabaseError as error:
            return _to_storage_error(error)
        return KeepFailed("deleted bytes are still on the disk; try again") if busy else None


class _transaction:
    """A transaction that commits when the `with` block ends, or rolls back if the block raises."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is None:
            try:
                self._connection.execute("COMMIT")
                return
            except sqlite3.DatabaseError:
                self._roll_back()
                raise
        self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # After some errors SQLite has already rolled back.
            self._connection.execute("ROLLBACK")


def _tell_all(some: list[tuple[_Write, MMEngineError | None]]) -> None:
    for write, error in some:
        write.tell(error)


def _to_storage_error(error: BaseException) -> MMEngineError:
    if isinstance(error, MMEngineError):
        return error
    return KeepFailed(f"the server's store cannot be written or read ({in_one_line(error)}); try again later")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check the database, and create or upgrade its tables. Raises ConfigError and sqlite3.DatabaseError."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise ConfigError(
            f"{path} was written by a newer mmengine (table version {version}; this program supports "
            f"{VERSION}); serve with the newer program, or move the file away"
        )
    if not version:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    connection.execute("PRAGMA journal_mode=WAL")
    if path.stat().st_size <= MAX_CHECKED_BYTES:
        with closing(connection.execute("PRAGMA quick_check(1)")) as found:
            said = found.fetchone()[0]
        if said != "ok":
            raise sqlite3.DatabaseError(said)
    if version < VERSION:
        with _transaction(connection):
            for statement in UPGRADE_FROM_1 if version else TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={VERSION}")

"""Stores batches as rows in the database. A row contains a batch's options, status and counts. A batch's
owner is an API key, stored as a prefix of the key's hash.
"""

import hashlib
import secrets
import sqlite3
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from mmengine.errors import QueueFull
from mmengine.server.storage.database import Database
from mmengine.server.storage.files import Files, StoredFile, insert
from mmengine.server.storage.list_positions import ListPositions

# Maximum number of batches of all owners together. When there are more batches, the oldest ended batches are
# deleted.
MAX_BATCHES = 10_000
MAX_LIVE_BATCHES = 200
LIVE = ("validating", "in_progress", "finalizing", "cancelling")


class LineError(msgspec.Struct, frozen=True):
    """An error that made a batch fail. `line`: 1-based line number, or None if the error concerns no single
    line.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch and its status.

    `at`: maps OpenAI's names (in_progress_at, …) to Unix times in seconds. `output_file_id` and
    `error_file_id` are "" until the batch has ended and has written the file.
    """

    batch_id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created: int
    expires_at: int
    status: str = "validating"
    counts: Counts = Counts()
    metadata: Mapping[str, str] | None = None
    errors: tuple[LineError, ...] = ()
    at: Mapping[str, int] = {}
    output_file_id: str = ""
    error_file_id: str = ""
    output_expires_s: int = 0
    key: str = ""  # The Idempotency-Key of the call that created the batch.
    digest: bytes = b""  # Digest of the call's route and body.

    @property
    def is_live(self) -> bool:
        return self.status in LIVE

    def file_id(self, kind: str) -> str:
        """Return the id of the batch's output file (`kind` "output") or error file (`kind` "errors").

        The id is derived from the batch id, so a batch that runs again after a crash writes the same files.
        """
        return f"file-{hashlib.sha256(f'{self.batch_id} {kind}'.encode()).hexdigest()[:24]}"

    def turned(self, status: str, now: float) -> "Batch":
        """Return a copy with the new `status`. `now`: the Unix time of the change in seconds."""
        return msgspec.structs.replace(self, status=status, at={**self.at, f"{status}_at": int(now)})


class Batches:
    def __init__(self, database: Database):
        self._database = database
        self._batches: dict[str, Batch] = {}  # Maps an id to the batch, in creation order.
        # Batches that have not ended, which the runner reads twice a second.
        self._live: dict[str, Batch] = {}
        self.places = ListPositions()
        self._num_coming = 0  # Number of batches that are being written to the database.
        rows = database.now(lambda it: it.execute("SELECT state FROM batches ORDER BY number").fetchall())
        for (state,) in rows:
            self._put(msgspec.json.decode(state, type=Batch))

    def _put(self, batch: Batch) -> None:
        self._batches[batch.batch_id] = batch
        self.places.add(batch.batch_id, batch.owner)
        if batch.is_live:
            self._live[batch.batch_id] = batch
        else:
            self._live.pop(batch.batch_id, None)

    @staticmethod
    def new_id() -> str:
        return f"batch_{secrets.token_hex(12)}"

    def get(self, batch_id: str, owner: str | None = None) -> Batch | None:
        """Return the batch, or None if the batch does not exist or has another owner."""
        batch = self._batches.get(batch_id)
        return batch if batch is not None and owner in (None, batch.owner) else None

    def created_by(self, owner: str, key: str) -> Batch | None:
        """Return the batch that a call with this Idempotency-Key created, or None."""
        return next((each for each in self.of_owner(owner) if each.key == key), None)

    def created_alike(self, owner: str, digest: bytes, since: float) -> Batch | None:
        """Return the owner's latest batch from a call with this digest and without an Idempotency-Key, or
        None. Batches that were created before `since` are ignored.
        """
        found = (each for each in reversed(self.of_owner(owner)) if not each.key and each.digest == digest)
        return next((each for each in found if each.created >= since), None)

    def of_owner(self, owner: str) -> list[Batch]:
        """Return the owner's batches, oldest first."""
        return [batch for batch in list(self._batches.values()) if batch.owner == owner]

    def live(self) -> list[Batch]:
        """Return the batches that have not ended, oldest first."""
        return list(self._live.values())

    def spared(self) -> set[str]:
        """Return the file ids that live batches write."""
        return {batch.file_id(kind) for batch in self.live() for kind in ("output", "errors")}

    def inputs(self) -> set[str]:
        """Return the file ids that live batches read."""
        return {batch.input_file_id for batch in self.live()}

    async def create(self, batch: Batch) -> None:
        """Add a batch. Returns when the batch is durable on disk. Raises QueueFull and KeepFailed."""
        if len(self._live) + self._num_coming >= MAX_LIVE_BATCHES:
            raise QueueFull(f"{MAX_LIVE_BATCHES} batches run or wait already; try again later")
        ended = (each.batch_id for each in self._batches.values() if not each.is_live)
        gone = list(islice(ended, max(0, len(self._batches) + self._num_coming + 1 - MAX_BATCHES)))

        def job(connection: sqlite3.Connection) -> None:
            _save(connection, batch)
            connection.executemany("DELETE FROM batches WHERE id=?", [(name,) for name in gone])

        self._num_coming += 1
        try:
            await self._database.write(job)
        finally:
            self._num_coming -= 1
        for name in gone:
            if self._batches.pop(name, None) is not None:
                self.places.remove(name)
        self._put(batch)

    async def save(self, batch: Batch) -> None:
        """Write a batch's new state to the database. The counts in memory stay unchanged, because they may be
        newer. Raises KeepFailed.
        """
        await self._database.write(lambda connection: _save(connection, batch))
        counts = self._batches[batch.batch_id].counts
        self._put(msgspec.structs.replace(batch, counts=counts))

    def count(self, batch_id: str, counts: Counts) -> None:
        """Set the counts in memory only. After a restart, the counts are computed again from the batch's
        files.
        """
        self._put(msgspec.structs.replace(self._batches[batch_id], counts=counts))

    async def end(self, batch: Batch, written: Iterable[StoredFile], files: Files) -> None:
        """Write a batch's final state and its files' rows in a single transaction. May be called again.
        Raises KeepFailed.
        """
        made = list(written)

        def job(connection: sqlite3.Connection) -> None:
            for file in made:
                insert(connection, file)
            _save(connection, batch)

        await self._database.write(job)
        for file in made:
            files.added(file)
        self._put(batch)


def _save(connection: sqlite3.Connection, batch: Batch) -> None:
    connection.execute(
        "INSERT INTO batches(id, state) VALUES (?, ?) ON CONFLICT(id) DO UPDATE SET state=excluded.state",
        (batch.batch_id, msgspec.json.encode(batch)),
    )

"""Stores responses with their media in the database. A response is deleted when it expires, when a client
deletes it, or when newer responses need the space.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from mmengine.errors import QueueFull, id_in_use
from mmengine.server.storage.database import Database

SWEEP_S = 30.0  # Seconds between two searches for expired answers.
_SWEPT_AT_ONCE = 256  # Maximum number of expired answers that are deleted in a commit.
# Possible numbers of rows in an INSERT statement, largest first. The statements are short, so that other
# threads can run between two statements.
_ROWS_AT_ONCE = (64, 16, 4, 1)
_UNFINISHED = "SELECT id FROM responses WHERE answer IS NULL ORDER BY id"


class AnswerRow(msgspec.Struct, frozen=True):
    """A row in the table `responses`.

    `created`: Unix time in seconds. `answer`: None until the answer is finished. `media`: the SHA-256 digests
    of the media in hex. `key`: the request's Idempotency-Key. `keeps_envelope`: whether an update of
    an existing row leaves the stored envelope unchanged.
    """

    response_id: str
    owner: str
    created: int
    envelope: bytes
    answer: bytes | None
    media: tuple[str, ...] = ()
    key: str = ""
    keeps_envelope: bool = False


class AnswerStore:
    """The stored answers of all owners. An owner is an API key, identified by a prefix of the key's hash.

    `ttl_s`: seconds after an answer's end until the answer expires, measured with `clock` (Unix time).
    `max_bytes`: maximum size of all answers together. If the answers exceed this size, the oldest finished
    answers are deleted. All methods raise KeepFailed if the disk fails.
    """

    def __init__(
        self, database: Database, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time
    ):
        self._database, self._ttl_s, self._max_bytes, self._clock = database, ttl_s, max_bytes, clock
        self.num_bytes = database.now(_num_bytes)
        # Ids of the answers that the previous process left unfinished.
        self.begun_before = database.now(partial(_ids, _UNFINISHED))

    async def begin(
        self,
        response_id: str,
        owner: str,
        created: int,
        envelope: bytes,
        media: Mapping[str, bytes],
        key: str = "",
    ) -> None:
        """Store a request that has no answer yet. May be called again for the same request.

        `media` maps SHA-256 digests in hex to the request's media. Raises QueueFull if unfinished answers
        fill the store, and InvalidRequest if another owner has the id.
        """
        await self._save(AnswerRow(response_id, owner, created, envelope, None, key=key), media)

    async def put(
        self,
        response_id: str,
        owner: str,
        created: int,
        envelope: bytes,
        answer: bytes,
        media: Mapping[str, bytes] | None = None,
    ) -> None:
        """Store an answer. Returns when the answer is durable on disk. A second call replaces the answer.

        `media`: media that were not passed to `begin`. Raises InvalidRequest if another owner has the id.
        """
        await self._save(AnswerRow(response_id, owner, created, envelope, answer), media or {})

    async def put_all(self, made: Callable[[], Sequence[AnswerRow]]) -> None:
        """Store several answers in a single commit. Answers whose ids belong to another owner are skipped.

        `made` returns the answers, and runs on the writing thread.
        """
        self.num_bytes = await self._database.write(lambda connection: self._save_all(connection, made()))

    async def get(self, response_id: str, owner: str) -> AnswerRow | None:
        """Return the answer, or None if the answer does not exist, has expired or has another owner."""
        return await self._find("id=?", response_id, owner)

    async def of_key(self, key: str, owner: str) -> AnswerRow | None:
        """Return the owner's latest unexpired answer with this Idempotency-Key, or None."""
        return await self._find("key=? AND key != ''", key, owner)

    async def _find(self, condition: str, value: str, owner: str) -> AnswerRow | None:
        def job(connection: sqlite3.Connection) -> AnswerRow | None:
            row = connection.execute(
                "SELECT id, owner, created, envelope, answer, key FROM responses "
                f"WHERE {condition} AND owner=? AND (answer IS NULL OR kept > ?) ORDER BY kept DESC LIMIT 1",
                (value, owner, self._clock() - self._ttl_s),
            ).fetchone()
            if row is None:
                return None
            name, whose, created, envelope, answer, key = row
            held = connection.execute("SELECT sha FROM holders WHERE response=? ORDER BY sha", (name,))
            return AnswerRow(name, whose, created, envelope, answer, tuple(sha for (sha,) in held), key)

        return await self._database.read(job)

    async def media(self, sha: str) -> bytes | None:
        """Return a medium's bytes, or None if no answer refers to the medium."""

        def job(connection: sqlite3.Connection) -> bytes | None:
            row = connection.execute("SELECT data FROM media WHERE sha=?", (sha,)).fetchone()
            return None if row is None else bytes(row[0])

        return await self._database.read(job)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete an answer, and return whether the answer existed. The answer's text is erased from the disk.
        Media are erased too if no other answer refers to them.
        """

        def job(connection: sqlite3.Connection) -> tuple[bool, int]:
            found = connection.execute("DELETE FROM responses WHERE id=? AND owner=?", (response_id, owner))
            return found.rowcount > 0, _num_bytes(connection)

        found, self.num_bytes = await self._database.write(job, scrub=True)
        return found

    async def ids(self) -> list[str]:
        """Return all answers' ids, sorted."""
        return await self._database.read(partial(_ids, "SELECT id FROM responses ORDER BY id"))

    async def unfinished(self) -> list[str]:
        """Return all unfinished answers' ids, sorted."""
        return await self._database.read(partial(_ids, _UNFINISHED))

    async def drop_unfinished(self, names: Sequence[str]) -> None:
        """Delete the unfinished answers whose ids are in `names`, for all owners."""

        def job(connection: sqlite3.Connection) -> int:
            rows = [(name,) for name in names]
            connection.executemany("DELETE FROM responses WHERE id=? AND answer IS NULL", rows)
            return _num_bytes(connection)

        self.num_bytes = await self._database.write(job, scrub=True)

    async def sweep(self) -> int:
        """Delete expired answers, and return how many answers were deleted."""
        total = 0
        while await self._any_expired():
            count, self.num_bytes = await self._database.write(self._sweep, scrub=True)
            total += count
        return total

    def _sweep(self, connection: sqlite3.Connection) -> tuple[int, int]:
        found = connection.execute(
            "DELETE FROM responses WHERE id IN (SELECT id FROM responses WHERE answer IS NOT NULL "
            "AND kept <= ? ORDER BY kept LIMIT ?)",
            (self._clock() - self._ttl_s, _SWEPT_AT_ONCE),
        )
        return found.rowcount, _num_bytes(connection)

    async def _any_expired(self) -> bool:
        limit = self._clock() - self._ttl_s
        query = "SELECT 1 FROM responses WHERE answer IS NOT NULL AND kept <= ? LIMIT 1"
        return await self._database.read(
            lambda connection: connection.execute(query, (limit,)).fetchone() is not None
        )

    async def _save(self, kept: AnswerRow, media: Mapping[str, bytes]) -> None:
        def job(connection: sqlite3.Connection) -> int:
            if not _put(connection, [kept], self._clock()):
                raise id_in_use(kept.response_id)
            _hold(connection, kept.response_id, media)
            return self._make_room(connection, [kept])

        self.num_bytes = await self._database.write(job)

    def _save_all(self, connection: sqlite3.Connection, answers: Sequence[AnswerRow]) -> int:
        now = self._clock()
        for some in _chunks(answers):
            _put(connection, some, now)
        return self._make_room(connection, answers)

    def _make_room(self, connection: sqlite3.Connection, answers: Sequence[AnswerRow]) -> int:
        """Delete the oldest finished answers until the remaining answers fit into the store. The given
        `answers` are never deleted. Returns the size of the remaining answers in bytes. Raises QueueFull.
        """
        total = _num_bytes(connection)
        names = {kept.response_id for kept in answers}
        while total > self._max_bytes:
            oldest = connection.execute(
                "SELECT id FROM responses WHERE answer IS NOT NULL ORDER BY kept LIMIT ?", (len(names) + 1,)
            )
            row = next((row for row in oldest.fetchall() if row[0] not in names), None)
            if row is None:
                # A finished answer is stored even beyond the limit, because its request was accepted.
                if answers[0].answer is not None:
                    return total
                raise QueueFull(
                    f"unfinished answers fill the store of {self._max_bytes} bytes (--store-bytes); try "
                    "again later, or send store=false"
                )
            connection.execute("DELETE FROM responses WHERE id=?", row)
            total = _num_bytes(connection)
        return total


def _chunks(answers: Sequence[AnswerRow]) -> Iterator[Sequence[AnswerRow]]:
    """Yield groups with the sizes in _ROWS_AT_ONCE, for which SQLite can reuse prepared statements."""
    at = 0
    while at < len(answers):
        size = next(size for size in _ROWS_AT_ONCE if size <= len(answers) - at)
        yield answers[at : at + size]
        at += size


def _put(connection: sqlite3.Connection, answers: Sequence[AnswerRow], now: float) -> int:
    """Insert rows in a single statement. If an id already exists, insert or update each row separately.

    Return how many `answers` were written. Answers whose ids belong to another owner are not written.
    """
    rows = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * len(answers))
    values: list[object] = []
    for kept in answers:
        values += (kept.response_id, kept.owner, kept.created, now, kept.envelope, kept.answer, kept.key)
    try:
        connection.execute(f"INSERT INTO responses VALUES {rows}", values)
    except sqlite3.IntegrityError:
        if len(answers) > 1:
            return sum(_put(connection, [kept], now) for kept in answers)
        return _change(connection, answers[0], now)
    _count(connection, sum(len(kept.envelope) + len(kept.answer or b"") for kept in answers))
    return len(answers)


def _change(connection: sqlite3.Connection, kept: AnswerRow, now: float) -> int:
    """Update an existing row, and return 1. Return 0 if the row belongs to another owner."""
    return connection.execute(
        "UPDATE responses SET envelope=iif(?, envelope, ?), kept=iif(answer IS NULL, ?, kept), "
        "answer=coalesce(?, answer) WHERE id=? AND owner=?",
        (kept.keeps_envelope, kept.envelope, now, kept.answer, kept.response_id, kept.owner),
    ).rowcount


def _count(connection: sqlite3.Connection, num_bytes: int) -> None:
    """Add new rows' bytes to the total. There is no trigger for this, because a trigger would double an
    insert's time.
    """
    connection.execute("UPDATE totals SET num_bytes = num_bytes + ?", (num_bytes,))


def _hold(connection: sqlite3.Connection, response_id: str, media: Mapping[str, bytes]) -> None:
    for sha, data in media.items():
        if connection.execute("INSERT OR IGNORE INTO media VALUES (?, ?)", (sha, data)).rowcount:
            _count(connection, len(data))
        connection.execute("INSERT OR IGNORE INTO holders VALUES (?, ?)", (response_id, sha))


def _ids(statement: str, connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute(statement)]


def _num_bytes(connection: sqlite3.Connection) -> int:
    (total,) = connection.execute("SELECT num_bytes FROM totals").fetchone()
    return int(total)

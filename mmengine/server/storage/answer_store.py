"""Answers that outlive the log: what was asked and said, and the media of it, until their time is over, their
room is needed, or they are deleted."""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from mmengine.errors import QueueFull, id_in_use
from mmengine.server.storage.database import Database

SWEEP_S = 30.0  # between two looks for what is too old
_SWEPT_AT_ONCE = 256  # answers that one commit removes
_ROWS_AT_ONCE = (64, 16, 4, 1)  # of one statement: threads take turns behind each
_UNFINISHED = "SELECT id FROM responses WHERE answer IS NULL ORDER BY id"


class Kept(msgspec.Struct, frozen=True):
    """`created`: Unix time in seconds. `answer`: None until it is finished. `media`: SHA-256 in hex.
    `key`: by which its owner may ask for it, too. `keeps_envelope`: one that is there already stays."""

    response_id: str
    owner: str
    created: int
    envelope: bytes
    answer: bytes | None
    media: tuple[str, ...] = ()
    key: str = ""
    keeps_envelope: bool = False


class Store:
    """`ttl_s`: from the end of an answer, as `clock` (Unix time) says. `max_bytes`: of all together; of what
    is finished the oldest goes first, and what is not never goes by itself.

    All raise KeepFailed where the disk fails.
    """

    def __init__(
        self, database: Database, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time
    ):
        self._database, self._ttl_s, self._max_bytes, self._clock = database, ttl_s, max_bytes, clock
        self.num_bytes = database.now(_num_bytes)
        self.begun_before = database.now(partial(_ids, _UNFINISHED))  # by the process before

    async def begin(
        self,
        response_id: str,
        owner: str,
        created: int,
        envelope: bytes,
        media: Mapping[str, bytes],
        key: str = "",
    ) -> None:
        """Keep what was accepted and has no answer yet. `media`: by their SHA-256 in hex. Once more is no
        error. Raises QueueFull where there is no room beside what is not finished either, InvalidRequest for
        an id that is another owner's."""
        await self._keep(Kept(response_id, owner, created, envelope, None, key=key), media)

    async def put(
        self,
        response_id: str,
        owner: str,
        created: int,
        envelope: bytes,
        answer: bytes,
        media: Mapping[str, bytes] | None = None,
    ) -> None:
        """Keep an answer: it is on the disk when this returns. `media`: those that `begin` was not given.
        Once more is no error, and takes the place of the answer before. Raises InvalidRequest for an id that
        is another owner's."""
        await self._keep(Kept(response_id, owner, created, envelope, answer), media or {})

    async def put_all(self, made: Callable[[], Sequence[Kept]]) -> None:
        """The same, of several at once; what has another owner's id is left out. `made`: gives them, on the
        thread that writes."""
        self.num_bytes = await self._database.write(lambda connection: self._keep_all(connection, made()))

    async def get(self, response_id: str, owner: str) -> Kept | None:
        """None where there is none, or it is another owner's."""
        return await self._find("id=?", response_id, owner)

    async def of_key(self, key: str, owner: str) -> Kept | None:
        """The last that came with this key. None where there is none of this owner."""
        return await self._find("key=? AND key != ''", key, owner)

    async def _find(self, asked: str, value: str, owner: str) -> Kept | None:
        def job(connection: sqlite3.Connection) -> Kept | None:
            row = connection.execute(
                "SELECT id, owner, created, envelope, answer, key FROM responses "
                f"WHERE {asked} AND owner=? AND (answer IS NULL OR kept > ?) ORDER BY kept DESC LIMIT 1",
                (value, owner, self._clock() - self._ttl_s),
            ).fetchone()
            if row is None:
                return None
            name, whose, created, envelope, answer, key = row
            held = connection.execute("SELECT sha FROM holders WHERE response=? ORDER BY sha", (name,))
            return Kept(name, whose, created, envelope, answer, tuple(sha for (sha,) in held), key)

        return await self._database.read(job)

    async def media(self, sha: str) -> bytes | None:
        """None where no answer holds it any more."""

        def job(connection: sqlite3.Connection) -> bytes | None:
            row = connection.execute("SELECT data FROM media WHERE sha=?", (sha,)).fetchone()
            return None if row is None else bytes(row[0])

        return await self._database.read(job)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Whether there was one. Its text is gone from the disk, and its media that no other answer holds."""

        def job(connection: sqlite3.Connection) -> tuple[bool, int]:
            found = connection.execute("DELETE FROM responses WHERE id=? AND owner=?", (response_id, owner))
            return found.rowcount > 0, _num_bytes(connection)

        found, self.num_bytes = await self._database.write(job, scrub=True)
        return found

    async def ids(self) -> list[str]:
        """Of all, in order."""
        return await self._database.read(partial(_ids, "SELECT id FROM responses ORDER BY id"))

    async def unfinished(self) -> list[str]:
        """Ids of those that have no answer yet."""
        return await self._database.read(partial(_ids, _UNFINISHED))

    async def drop_unfinished(self, names: Sequence[str]) -> None:
        """Those of them that have no answer, whoever's they are."""

        def job(connection: sqlite3.Connection) -> int:
            rows = [(name,) for name in names]
            connection.executemany("DELETE FROM responses WHERE id=? AND answer IS NULL", rows)
            return _num_bytes(connection)

        self.num_bytes = await self._database.write(job, scrub=True)

    async def sweep(self) -> int:
        """Remove answers whose time is over; how many."""
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
        asked = "SELECT 1 FROM responses WHERE answer IS NOT NULL AND kept <= ? LIMIT 1"
        return await self._database.read(
            lambda connection: connection.execute(asked, (limit,)).fetchone() is not None
        )

    async def _keep(self, kept: Kept, media: Mapping[str, bytes]) -> None:
        def job(connection: sqlite3.Connection) -> int:
            if not _put(connection, [kept], self._clock()):
                raise id_in_use(kept.response_id)
            _hold(connection, kept.response_id, media)
            return self._make_room(connection, [kept])

        self.num_bytes = await self._database.write(job)

    def _keep_all(self, connection: sqlite3.Connection, answers: Sequence[Kept]) -> int:
        now = self._clock()
        for some in _chunks(answers):
            _put(connection, some, now)
        return self._make_room(connection, answers)

    def _make_room(self, connection: sqlite3.Connection, answers: Sequence[Kept]) -> int:
        """Bytes of all, after the oldest but these went. Raises QueueFull."""
        total = _num_bytes(connection)
        names = {kept.response_id for kept in answers}
        while total > self._max_bytes:
            oldest = connection.execute(
                "SELECT id FROM responses WHERE answer IS NOT NULL ORDER BY kept LIMIT ?", (len(names) + 1,)
            )
            row = next((row for row in oldest.fetchall() if row[0] not in names), None)
            if row is None:
                if answers[0].answer is not None:  # it was accepted, and so it is kept
                    return total
                raise QueueFull(
                    f"answers and their media have {self._max_bytes} bytes (--store-bytes), and none is "
                    "finished that could go; try again later, or send store false"
                )
            connection.execute("DELETE FROM responses WHERE id=?", row)
            total = _num_bytes(connection)
        return total


def _chunks(answers: Sequence[Kept]) -> Iterator[Sequence[Kept]]:
    """Of a few sizes alone, so that SQLite has their statements ready."""
    at = 0
    while at < len(answers):
        size = next(size for size in _ROWS_AT_ONCE if size <= len(answers) - at)
        yield answers[at : at + size]
        at += size


def _put(connection: sqlite3.Connection, answers: Sequence[Kept], now: float) -> int:
    """By one statement where none of them is there. Gives how many are there then: all but those whose id is
    another owner's."""
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


def _change(connection: sqlite3.Connection, kept: Kept, now: float) -> int:
    """What is there already. Gives 0 where it is another owner's."""
    return connection.execute(
        "UPDATE responses SET envelope=iif(?, envelope, ?), kept=iif(answer IS NULL, ?, kept), "
        "answer=coalesce(?, answer) WHERE id=? AND owner=?",
        (kept.keeps_envelope, kept.envelope, now, kept.answer, kept.response_id, kept.owner),
    ).rowcount


def _count(connection: sqlite3.Connection, num_bytes: int) -> None:
    """Of new rows: a trigger for each would cost as much as the row."""
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

"""The store of answers beside the log: what was acknowledged is there, what was deleted is nowhere."""

import asyncio
import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmengine.errors import ConfigError, InvalidRequest, KeepFailed, QueueFull
from mmengine.server.keep.database import NAME, Database
from mmengine.server.keep.store import Kept, Store

LARGE = 2**30


class Walked:
    """A store and what it must hold, by a plain dict."""

    def __init__(self, folder, ttl_s=100.0, max_bytes=LARGE):
        self.folder, self.ttl_s, self.max_bytes = folder, ttl_s, max_bytes
        self.now = 1000.0
        self.rows = {}  # id -> [owner, created, envelope, answer, media, kept]
        self.open()

    def open(self):
        self.database = Database(self.folder)
        self.store = Store(self.database, self.ttl_s, self.max_bytes, lambda: self.now)

    def reopen(self):
        self.database.close()
        self.open()

    def begin(self, name, owner, envelope, media):
        row = self.rows.setdefault(name, [owner, int(self.now), envelope, None, {}, self.now])
        row[2] = envelope
        row[4] |= media

    def put(self, name, owner, envelope, answer, media):
        self.begin(name, owner, envelope, media)
        row = self.rows[name]
        if row[3] is None:
            row[5] = self.now
        row[3] = answer

    def sweep(self):
        gone = [
            name for name, row in self.rows.items() if row[3] is not None and row[5] <= self.now - self.ttl_s
        ]
        for name in gone:
            del self.rows[name]
        return len(gone)

    def num_bytes(self):
        media = {sha: len(data) for row in self.rows.values() for sha, data in row[4].items()}
        return sum(len(row[2]) + len(row[3] or b"") for row in self.rows.values()) + sum(media.values())

    async def check(self):
        assert await self.store.ids() == sorted(self.rows)
        assert await self.store.unfinished() == sorted(n for n, row in self.rows.items() if row[3] is None)
        shas = set()
        for name, (owner, created, envelope, answer, media, kept) in self.rows.items():
            held = tuple(sorted(media))
            expired = answer is not None and kept <= self.now - self.ttl_s
            found = None if expired else Kept(name, owner, created, envelope, answer, held)
            assert await self.store.get(name, owner) == found
            assert await self.store.get(name, owner + "x") is None
            for sha, data in media.items():
                assert await self.store.media(sha) == data
            shas |= set(media)
        count = await self.database.read(lambda c: c.execute("SELECT count(*) FROM media").fetchone()[0])
        assert count == len(shas)  # nothing that nobody holds
        assert self.store.num_bytes == self.num_bytes()


def some_media(chosen):
    made = [bytes([number]) * chosen.choice([1, 5000]) for number in range(4)]
    return {hashlib.sha256(data).hexdigest(): data for data in chosen.sample(made, chosen.randrange(3))}


async def walk(folder, seed, steps):
    chosen, it = random.Random(seed), Walked(folder)
    try:
        for _ in range(steps):
            name, owner = f"resp_{chosen.randrange(8)}", "a"
            envelope, media = chosen.randbytes(20), some_media(chosen)
            match chosen.randrange(8):
                case 0 | 1:
                    await it.store.begin(name, owner, int(it.now), envelope, media)
                    it.begin(name, owner, envelope, media)
                case 2 | 3:
                    answer = chosen.randbytes(chosen.choice([10, 9000]))
                    await it.store.put(name, owner, int(it.now), envelope, answer, media)
                    it.put(name, owner, envelope, answer, media)
                case 4:
                    assert await it.store.delete(name, owner) == (it.rows.pop(name, None) is not None)
                    assert not await it.store.delete(name, "b")
                case 5:
                    it.now += chosen.choice([0, 30, -20])
                    assert await it.store.sweep() == it.sweep()
                case 6:
                    it.reopen()
                case 7 if name in it.rows:
                    with pytest.raises(InvalidRequest, match="in use"):
                        await it.store.put(name, "b", 1, b"", b"", media)
            await it.check()
    finally:
        it.database.close()


@pytest.mark.parametrize("seed", range(3))
def test_it_holds_what_a_dict_would(tmp_path, seed):
    asyncio.run(walk(tmp_path / "store", seed, 60))


def test_what_was_deleted_is_in_no_file(tmp_path):
    """Neither the text nor a medium, also where an answer was put twice; what another answer holds stays."""
    word, image, shared = b"a secret word " * 9, b"\x89pixels of one" * 999, b"\x89pixels of both" * 999
    names = [hashlib.sha256(data).hexdigest() for data in (image, shared)]

    async def go():
        database = Database(tmp_path)
        store = Store(database, 1e6, LARGE)
        await store.begin("one", "a", 1, b"asked" + word, {names[0]: image, names[1]: shared})
        await store.put("one", "a", 1, b"asked" + word, b"first" + word)
        await store.put("one", "a", 1, b"asked" + word, b"said" + word)
        await store.put("two", "a", 1, b"", b"", {names[1]: shared})
        assert holding(word) and holding(image)
        assert await store.delete("one", "a")
        assert not holding(word) and not holding(image) and holding(shared)
        assert await store.media(names[1]) == shared
        database.close()

    def holding(data):
        return any(data[:40] in path.read_bytes() for path in tmp_path.iterdir())

    asyncio.run(go())


def test_its_files_are_its_owners_alone(tmp_path):
    folder = tmp_path / "store"
    database = Database(folder)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert set(modes.values()) == {0o600} and NAME in modes
    database.close()


def test_the_oldest_finished_go_for_room(tmp_path):
    async def go():
        database, now = Database(tmp_path), [0.0]
        store = Store(database, 1e6, 1000, lambda: now[0])
        await store.begin("live", "a", 1, b"x" * 300, {})
        for number in range(4):
            now[0] += 1
            await store.put(f"done{number}", "a", 1, b"", b"x" * 200)
        assert await store.ids() == ["done1", "done2", "done3", "live"] and store.num_bytes == 900
        await store.begin("live2", "a", 1, b"x" * 600, {})
        assert await store.ids() == ["live", "live2"]
        with pytest.raises(QueueFull, match="store-bytes"):
            await store.begin("live3", "a", 1, b"x" * 200, {})
        assert await store.ids() == ["live", "live2"]
        await store.put("live", "a", 1, b"x" * 300, b"x" * 400)  # accepted: it is kept
        assert (await store.get("live", "a")).answer == b"x" * 400
        database.close()

    asyncio.run(go())


def test_writes_that_wait_share_a_commit(tmp_path):
    commits = []

    async def go():
        database = Database(tmp_path, lambda place: (commits.append(place), time.sleep(0.02)))
        store = Store(database, 1e6, LARGE)
        puts = [store.put(f"r{number}", "a", 1, b"", b"x") for number in range(50)]
        wrong = store.put("r0", "other", 1, b"", b"x")  # spoils nothing for those beside it
        found = await asyncio.gather(*puts, wrong, return_exceptions=True)
        assert found[:-1] == [None] * 50 and isinstance(found[-1], InvalidRequest)
        assert len(await store.ids()) == 50
        database.close()

    asyncio.run(go())
    assert commits[:2] == ["before commit", "after commit"] and len(commits) <= 6


def test_a_full_disk_is_told_and_costs_nothing_that_is_there(tmp_path):
    async def go():
        database = Database(tmp_path)
        store = Store(database, 1e6, LARGE)
        await store.put("one", "a", 1, b"", b"x")
        pages = database._writing.execute("PRAGMA page_count").fetchone()[0]
        database._writing.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(KeepFailed, match="full"):
            await store.put("two", "a", 1, b"", b"x" * 100_000)
        assert await store.ids() == ["one"]
        database._writing.execute("PRAGMA max_page_count=1000000")
        await store.put("two", "a", 1, b"", b"x" * 100_000)
        assert await store.ids() == ["one", "two"]
        database.close()

    asyncio.run(go())


def test_a_disk_that_fails_at_a_commit_fails_those_who_wait(tmp_path):
    failing = []

    def fault(place):
        if failing and place == "before commit":
            raise OSError(28, "No space left on device")

    async def go():
        database = Database(tmp_path, fault)
        store = Store(database, 1e6, LARGE)
        failing.append(True)
        with pytest.raises(KeepFailed, match="No space left"):
            await store.put("one", "a", 1, b"", b"x")
        failing.clear()
        assert await store.ids() == []
        await store.put("one", "a", 1, b"", b"x")
        database.close()
        with pytest.raises(KeepFailed, match="shutting down"):
            await store.put("one", "a", 1, b"", b"x")

    asyncio.run(go())


def test_one_process_alone(tmp_path):
    database = Database(tmp_path)
    code = "import sys, pathlib; from mmengine.server.keep import database as it; "
    code += "it.Database(pathlib.Path(sys.argv[1]))"
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert ran.returncode and "another process keeps its answers" in ran.stderr
    database.close()
    Database(tmp_path).close()


def test_what_is_damaged_or_newer_is_refused_in_a_sentence(tmp_path):
    Database(tmp_path).close()
    path = tmp_path / NAME
    good = path.read_bytes()
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(ConfigError, match="damaged .*move it away"):
        Database(tmp_path)
    path.write_bytes(good[:4096] + bytes(4096) + good[8192:])
    with pytest.raises(ConfigError, match="damaged"):
        Database(tmp_path)
    path.write_bytes(good)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(ConfigError, match="newer mmengine"):
        Database(tmp_path)
    path.write_bytes(good)
    Database(tmp_path).close()  # none of them kept the lock


PUTS = """
import asyncio, sys
from pathlib import Path
from mmengine.server.keep.database import Database
from mmengine.server.keep.store import Store

async def go():
    store = Store(Database(Path(sys.argv[1])), 1e6, 2**30)
    first = int(sys.argv[2])
    async def put(name):
        await store.begin(name, "a", 1, b"", {name * 8: name.encode() * 99})
        await store.put(name, "a", 1, b"", name.encode() * 500)
        print(name, flush=True)
    number = first
    while True:
        await asyncio.gather(*(put(f"r{number + each:07}") for each in range(8)))
        number += 8
asyncio.run(go())
"""


def killed_in_puts(folder, chosen, times):
    """What was acknowledged before each kill is there after it."""
    acknowledged = set()
    for number in range(times):
        command = [sys.executable, "-c", PUTS, folder, str(number * 100_000)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        first = process.stdout.readline()
        time.sleep(chosen.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        acknowledged |= {
            name for name in (first + process.stdout.read()).decode().split("\n") if len(name) == 8
        }
        process.wait()
        process.stdout.close()
    assert len(acknowledged) >= times

    async def check():
        database = Database(folder)
        store = Store(database, 1e6, LARGE)
        for name in acknowledged:
            found = await store.get(name, "a")
            assert found.answer == name.encode() * 500 and await store.media(name * 8) == name.encode() * 99
        database.close()

    asyncio.run(check())


def test_what_was_acknowledged_outlives_a_kill(tmp_path):
    killed_in_puts(tmp_path, random.Random(1), 2)

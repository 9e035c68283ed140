"""Checks the answer store: compares random operations with a dict, and kills a writing process."""

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmengine.errors import InvalidRequest
from mmengine.server.storage.answer_store import AnswerRow, AnswerStore
from mmengine.server.storage.database import Database

LARGE = 2**30


class Walked:
    """An answer store, and a dict with the expected contents."""

    def __init__(self, folder, ttl_s=100.0, max_bytes=LARGE):
        self.folder, self.ttl_s, self.max_bytes = folder, ttl_s, max_bytes
        self.now = 1000.0
        self.rows = {}  # id -> [owner, created, envelope, answer, media, kept, key]
        self.open()

    def open(self):
        self.database = Database(self.folder)
        self.store = AnswerStore(self.database, self.ttl_s, self.max_bytes, lambda: self.now)

    def reopen(self):
        self.database.close()
        self.open()

    def begin(self, name, owner, envelope, media, key=""):
        row = self.rows.setdefault(name, [owner, int(self.now), envelope, None, {}, self.now, key])
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
        for name, (owner, created, envelope, answer, media, kept, key) in self.rows.items():
            held = tuple(sorted(media))
            expired = answer is not None and kept <= self.now - self.ttl_s
            found = None if expired else AnswerRow(name, owner, created, envelope, answer, held, key)
            assert await self.store.get(name, owner) == found
            assert await self.store.get(name, owner + "x") is None
            assert await self.store.of_key(key, owner) == (found if key else None)
            assert await self.store.of_key(key, owner + "x") is None
            for sha, data in media.items():
                assert await self.store.media(sha) == data
            shas |= set(media)
        count = await self.database.read(lambda c: c.execute("SELECT count(*) FROM media").fetchone()[0])
        assert count == len(shas)  # There are no unreferenced media.
        assert self.store.num_bytes == self.num_bytes()


def some_media(chosen):
    made = [bytes([number]) * chosen.choice([1, 5000]) for number in range(4)]
    return {hashlib.sha256(data).hexdigest(): data for data in chosen.sample(made, chosen.randrange(3))}


async def walk(folder, seed, steps):
    chosen, it = random.Random(seed), Walked(folder)
    try:
        for _ in range(steps):
            number = chosen.randrange(8)
            name, owner, key = f"resp_{number}", "a", ("", f"key of {number}")[number % 2]
            envelope, media = chosen.randbytes(20), some_media(chosen)
            match chosen.randrange(8):
                case 0 | 1:
                    await it.store.begin(name, owner, int(it.now), envelope, media, key)
                    it.begin(name, owner, envelope, media, key)
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


PUTS = """
import asyncio, sys
from pathlib import Path
from mmengine.server.storage.database import Database
from mmengine.server.storage.answer_store import AnswerStore

async def go():
    store = AnswerStore(Database(Path(sys.argv[1])), 1e6, 2**30)
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
    """Kill processes that store answers, and check that all acknowledged answers exist."""
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
        store = AnswerStore(database, 1e6, LARGE)
        for name in acknowledged:
            found = await store.get(name, "a")
            assert found.answer == name.encode() * 500 and await store.media(name * 8) == name.encode() * 99
        database.close()

    asyncio.run(check())

"""Long tests of the answer store: random operations, many kills, and a server that ends at each commit."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mmengine.server.storage.answer_store import AnswerStore
from mmengine.server.storage.database import Database
from tests.server.keep_model import LARGE, killed_in_puts, walk

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_the_store_behaves_like_a_dict(tmp_path, seed):
    asyncio.run(walk(tmp_path / "store", seed, 400))


@pytest.mark.soak
def test_acknowledged_records_survive_kills(tmp_path):
    killed_in_puts(tmp_path, random.Random(2), 60)


ENDS = """
import asyncio, os, sys
from pathlib import Path
from mmengine.server.storage.database import Database
from mmengine.server.storage.answer_store import AnswerStore

where, count = sys.argv[2], int(sys.argv[3])

def fault(place):
    global count
    count -= place == where
    if count < 0:
        os._exit(9)

async def go():
    store = AnswerStore(Database(Path(sys.argv[1]), fault), 1e6, 2**30)
    for name in ("one", "two", "three"):
        await store.begin(name, "a", 1, b"asked", {name * 8: name.encode() * 99})
        print("begun", name, flush=True)
        await store.put(name, "a", 1, b"asked", name.encode() * 500)
        print("put", name, flush=True)
    await store.delete("two", "a")
    print("deleted two", flush=True)
    await store.sweep()

asyncio.run(go())
"""


@pytest.mark.soak
@pytest.mark.parametrize("where", ["before commit", "after commit"])
@pytest.mark.parametrize("count", range(7))
def test_a_server_that_ends_at_a_commit_keeps_acknowledged_data(tmp_path, where, count):
    command = [sys.executable, "-c", ENDS, tmp_path, where, str(count)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 9, ran.stderr
    said = ran.stdout.splitlines()
    assert len(said) == count

    async def look():
        database = Database(tmp_path)
        store = AnswerStore(database, 1e6, LARGE)
        found = {name: await store.get(name, "a") for name in ("one", "two", "three")}
        for name, kept in found.items():
            if f"put {name}" in said and not (name == "two" and count >= 6):
                assert kept.answer == name.encode() * 500
            if f"begun {name}" in said and not (name == "two" and count >= 6):
                assert await store.media(name * 8) == name.encode() * 99
        if where == "after commit":  # the last commit was not acknowledged
            assert len(await store.ids()) == [1, 1, 2, 2, 3, 3, 2][count]
            assert len(await store.unfinished()) == (count in (0, 2, 4))
        elif count < 6:
            assert len(await store.ids()) == [0, 1, 1, 2, 2, 3][count]
        # Repeating a call is no error, because a client repeats its call after a restart.
        for name in ("one", "two", "three"):
            await store.begin(name, "a", 1, b"asked", {name * 8: name.encode() * 99})
            await store.put(name, "a", 1, b"asked", name.encode() * 500)
            assert (await store.get(name, "a")).media == (name * 8,)
        database.close()

    asyncio.run(look())

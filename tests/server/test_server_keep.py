"""Tests the server's store of answers, files and batches: durability, deletion, eviction and migration."""

import asyncio
import hashlib
import random
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mmengine.errors import ConfigError, InvalidRequest, KeepFailed, QueueFull
from mmengine.server.storage import batches as batches_module
from mmengine.server.storage.answer_store import AnswerStore
from mmengine.server.storage.batches import Batch, Batches, Counts
from mmengine.server.storage.database import NAME, Database
from mmengine.server.storage.files import FileLimits, Files
from tests.server.keep_model import LARGE, killed_in_puts, walk


@pytest.mark.parametrize("seed", range(3))
def test_the_store_behaves_like_a_dict(tmp_path, seed):
    asyncio.run(walk(tmp_path / "store", seed, 60))


def test_deleted_answers_leave_no_bytes(tmp_path):
    """A deleted answer's text and media are erased from the files, even if the answer was written twice.
    Media that other answers use remain.
    """
    word, image, shared = b"a secret word " * 9, b"\x89pixels of one" * 999, b"\x89pixels of both" * 999
    names = [hashlib.sha256(data).hexdigest() for data in (image, shared)]

    async def go():
        database = Database(tmp_path)
        store = AnswerStore(database, 1e6, LARGE)
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


def test_store_files_are_private(tmp_path):
    folder = tmp_path / "store"
    database = Database(folder)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert set(modes.values()) == {0o600} and NAME in modes
    database.close()


def test_the_oldest_finished_answers_are_evicted(tmp_path):
    async def go():
        database, now = Database(tmp_path), [0.0]
        store = AnswerStore(database, 1e6, 1000, lambda: now[0])
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
        # A finished answer is stored even if it exceeds the limit.
        await store.put("live", "a", 1, b"x" * 300, b"x" * 400)
        assert (await store.get("live", "a")).answer == b"x" * 400
        database.close()

    asyncio.run(go())


def test_writes_that_wait_share_a_commit(tmp_path):
    commits = []

    async def go():
        database = Database(tmp_path, lambda place: (commits.append(place), time.sleep(0.02)))
        store = AnswerStore(database, 1e6, LARGE)
        puts = [store.put(f"r{number}", "a", 1, b"", b"x") for number in range(50)]
        # Fails, because another owner has `r0`. The error must not affect other writes in the commit.
        wrong = store.put("r0", "other", 1, b"", b"x")
        found = await asyncio.gather(*puts, wrong, return_exceptions=True)
        assert found[:-1] == [None] * 50 and isinstance(found[-1], InvalidRequest)
        assert len(await store.ids()) == 50
        database.close()

    asyncio.run(go())
    assert commits[:2] == ["before commit", "after commit"] and len(commits) <= 6


def test_a_full_disk_keeps_stored_answers(tmp_path):
    async def go():
        database = Database(tmp_path)
        store = AnswerStore(database, 1e6, LARGE)
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


def test_a_failed_commit_fails_its_writers(tmp_path):
    failing = []

    def fault(place):
        if failing and place == "before commit":
            raise OSError(28, "No space left on device")

    async def go():
        database = Database(tmp_path, fault)
        store = AnswerStore(database, 1e6, LARGE)
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


def test_a_second_process_cannot_open_the_store(tmp_path):
    database = Database(tmp_path)
    code = "import sys, pathlib; from mmengine.server.storage import database as it; "
    code += "it.Database(pathlib.Path(sys.argv[1]))"
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert ran.returncode and "another process stores answers in" in ran.stderr
    database.close()
    Database(tmp_path).close()


def test_damaged_or_newer_stores_are_refused(tmp_path):
    Database(tmp_path).close()
    path = tmp_path / NAME
    good = path.read_bytes()
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(ConfigError, match="damaged .*move the file away"):
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
    Database(tmp_path).close()  # The failed attempts released the lock.


def test_old_tables_get_a_key_column(tmp_path):
    """Tables of version 1 are upgraded when they are opened."""
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / NAME) as connection:
        connection.execute("DROP INDEX responses_by_key")
        connection.execute("ALTER TABLE responses DROP COLUMN key")
        connection.execute("INSERT INTO responses VALUES ('old', 'a', 1, 0.0, x'', x'00')")
        connection.execute(
            "CREATE TRIGGER responses_come AFTER INSERT ON responses "
            "BEGIN UPDATE totals SET num_bytes = num_bytes + 1; END"
        )
        connection.execute("PRAGMA user_version=1")
    connection.close()
    database = Database(tmp_path)
    store = AnswerStore(database, 100.0, LARGE, lambda: 1.0)

    async def go():
        assert (await store.get("old", "a")).key == ""
        before = store.num_bytes
        await store.begin("new", "a", 1, b"asked", {}, "mine")
        assert store.num_bytes == before + 5, "a new row counts once"
        return await store.of_key("mine", "a")

    assert asyncio.run(go()).response_id == "new"
    database.close()


def test_acknowledged_answers_survive_a_kill(tmp_path):
    killed_in_puts(tmp_path, random.Random(1), 2)


def test_file_writes_run_beside_the_event_loop(tmp_path, monkeypatch):
    """Files are deleted on a thread, because deleting a large file takes 0.1 s."""
    threads, unlink = [], Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda self, **how: threads.append(threading.get_ident()) or unlink(self, **how)
    )

    async def go():
        database = Database(tmp_path)
        files = Files(database, FileLimits(100, 100, 100))
        incoming = files.incoming("a")
        incoming.write(b"all of it")
        incoming.finish()
        file = await files.add(incoming, "name", "batch")
        assert await files.delete(file.file_id, "a") and not files.path(file.file_id).exists()
        assert len(threads) == 1 and threading.get_ident() not in threads
        files.close()
        database.close()

    asyncio.run(go())


def a_batch(number, status="validating"):
    return Batch(
        batch_id=f"batch_{number}",
        owner="a",
        endpoint="/v1/chat/completions",
        input_file_id=f"file-{number}",
        completion_window="24h",
        created=number,
        expires_at=10**6,
        status=status,
    )


def test_the_number_of_batches_is_limited(tmp_path, monkeypatch):
    """New batches are refused while MAX_LIVE_BATCHES batches have not ended. Above MAX_BATCHES, the oldest
    ended batches are deleted.
    """
    monkeypatch.setattr(batches_module, "MAX_LIVE_BATCHES", 5)
    monkeypatch.setattr(batches_module, "MAX_BATCHES", 8)

    async def go():
        database = Database(tmp_path)
        batches = Batches(database)
        found = await asyncio.gather(
            *(batches.create(a_batch(number)) for number in range(20)), return_exceptions=True
        )
        assert [type(each) for each in found] == [type(None)] * 5 + [QueueFull] * 15
        for number in range(5):
            await batches.save(a_batch(number, "completed"))
        assert not batches.live() and not batches.inputs()
        await asyncio.gather(*(batches.create(a_batch(number)) for number in range(20, 25)))
        with pytest.raises(QueueFull, match="5 batches"):
            await batches.create(a_batch(30))
        batches.count("batch_22", Counts(3, 2, 1))
        for those in (batches, Batches(database)):
            assert [each.created for each in those.of_owner("a")] == [2, 3, 4, *range(20, 25)]
            assert [each.created for each in those.live()] == [*range(20, 25)]
        assert batches.live()[2].counts == Counts(3, 2, 1)
        database.close()

    asyncio.run(go())

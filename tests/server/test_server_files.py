"""Tests /v1/files: uploads, lists, expiry, limits, and the separation of API keys."""

import asyncio
import http.client
import os
import random
import time

import openai
import pytest

from mmengine.core.resume import Resume
from mmengine.server.storage import batches, files
from mmengine.server.storage import list_positions as places
from mmengine.server.storage.files import PART
from tests.server.batching import Failing, batching, begun, client_of, ended, line
from tests.server.running import wait_for

BOUNDARY = "xyz"


def part(name, data, filename=None):
    head = f'content-disposition: form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    return b"--xyz\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n"


def form(*parts):
    return b"".join(parts) + b"--xyz--\r\n"


def sent(server, body, kind=f"multipart/form-data; boundary={BOUNDARY}"):
    status, _, answer = server.call("/v1/files", body, {"content-type": kind}, "POST")
    return status, answer["error"]["message"] if "error" in answer else answer


def uploads(server):
    """Return the number of uploads in progress."""
    return server.app._endpoints["POST", "/v1/files"].__self__._uploads.total()


def folder_of(server):
    return sorted(path.name for path in server.storage.files.folder.iterdir())


def test_uploads_round_trip(tmp_path):
    chosen = random.Random(0)
    with batching(tmp_path / "log") as (server, client):
        for number, size in enumerate((0, 1, 70_000, 3_000_000)):
            data = chosen.randbytes(size) + b"\r\n--xyz\r\n--\r"  # The end looks like a boundary.
            file = client.files.create(file=(f"file {number}.bin", data), purpose="user_data")
            assert (
                file.bytes == len(data)
                and file.filename == f"file {number}.bin"
                and file.status == "processed"
            )
            content = client.files.content(file.id)
            assert (
                content.read() == data
                and f"file%20{number}.bin" in content.response.headers["content-disposition"]
            )
            assert client.files.retrieve(file.id) == file
            path = server.storage.files.path(file.id)
            assert path.stat().st_mode & 0o777 == 0o600
        assert client.files.delete(file.id).deleted and not path.exists()
        with pytest.raises(openai.NotFoundError):
            client.files.delete(file.id)
        assert len(folder_of(server)) == 3


def test_lists_have_pages(tmp_path):
    with batching(tmp_path / "log") as (server, client):
        purposes = ["batch", "vision", "batch", "user_data", "batch"]
        ids = [client.files.create(file=("a", b"{}"), purpose=each).id for each in purposes]
        assert [each.id for each in client.files.list()] == ids[::-1]
        # The client fetches all pages.
        assert [each.id for each in client.files.list(limit=2, order="asc")] == ids
        assert [each.id for each in client.files.list(purpose="batch", limit=1)] == [ids[4], ids[2], ids[0]]
        page = client.files.list(limit=2, after=ids[3])
        assert [each.id for each in page.data] == [ids[2], ids[1]] and page.has_more
        for wrong in ("limit=0", "limit=10001", "limit=a", "order=up", "after=file-none"):
            assert server.call(f"/v1/files?{wrong}")[0] == 400
            assert server.call(f"/v1/batches?{wrong}")[0] == 400


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_page_continues_after_a_deleted_file(tmp_path, monkeypatch, order):
    (tmp_path / "keys").write_text("one\nother\n")
    monkeypatch.setattr(places, "MAX_GONE", 3)
    with batching(tmp_path / "log", key="one", key_file=tmp_path / "keys") as (server, client):
        ids = [client.files.create(file=("a", b"{}"), purpose="vision").id for _ in range(6)]
        ids = ids if order == "asc" else ids[::-1]
        for name in ids[1:4]:
            client.files.delete(name)
        for after, left in ((0, [4, 5]), (1, [4, 5]), (3, [4, 5]), (4, [5]), (5, [])):
            page = client.files.list(after=ids[after], order=order)
            assert [each.id for each in page.data] == [ids[place] for place in left]
        client.files.delete(ids[4])
        asked = {"authorization": "Bearer one"}
        assert server.call(f"/v1/files?after={ids[4]}", headers=asked)[0] == 200
        assert server.call(f"/v1/files?after={ids[1]}", headers=asked)[0] == 400, (
            "the position of this deleted file is no longer kept"
        )
        assert server.call(f"/v1/files?after={ids[4]}", headers={"authorization": "Bearer other"})[0] == 400


def test_a_page_continues_after_a_deleted_batch(tmp_path, monkeypatch):
    with batching(tmp_path / "log") as (_, client):
        first = ended(client, begun(client, [line("a", max_tokens=1)]))
        monkeypatch.setattr(batches, "MAX_BATCHES", 1)
        second = begun(client, [line("a", max_tokens=1)])
        assert [each.id for each in client.batches.list()] == [second.id]
        assert not client.batches.list(after=first.id).data


def test_invalid_uploads_leave_no_file(tmp_path):
    good = part("purpose", b"batch"), part("file", b"{}", "a.jsonl")
    with batching(tmp_path / "log", max_file_bytes=1024, files_bytes=2500) as (server, _):
        for body, text in (
            (form(good[0]), "file is missing"),
            (form(good[1]), "purpose must be"),
            (form(part("purpose", b"fine-tune"), good[1]), "purpose must be"),
            (form(*good, good[1]), "appears twice"),
            (form(*good, part("more", b"a")), "unknown field more"),
            (form(part("purpose", b"a" * 1025), good[1]), "exceeds 1024 bytes"),
            (form(*good)[:-10], "ends before its last boundary"),
            (b"", "ends before"),
            (b"no form at all", "not valid multipart"),
            (form(*good, part("expires_after[anchor]", b"created_at")), "seconds must be"),
            (form(*good, part("expires_after[seconds]", b"3600")), "anchor must be"),
            (b"--xyz\r\nno header\r\n\r\n\r\n", "invalid character 32"),
            (b"--xyz\r\n" + b"x: %s\r\n" % (b"a" * 4000) * 3, "headers of a part"),
            (b"--xyz\r\n\r\nno name\r\n--xyz--\r\n", "no name"),
        ):
            status, said = sent(server, body)
            assert status == 400 and text in said, (body[:80], said)
        status, said = sent(server, form(good[0], part("file", b"x" * 1025, "a")))
        assert status == 413 and "max_file_bytes" in said
        assert sent(server, form(*good), "text/plain")[0] == 400
        assert sent(server, form(*good), "multipart/form-data")[0] == 400
        assert folder_of(server) == []
        assert [sent(server, form(good[0], part("file", b"x" * 1000, "a")))[0] for _ in range(3)] == [
            200,
            200,
            400,
        ]
        status, said = sent(server, form(good[0], part("file", b"x" * 1000, "a")))
        assert status == 400 and "files_bytes" in said
        assert len(folder_of(server)) == 2


def test_an_interrupted_upload_leaves_no_file(tmp_path):
    with batching(tmp_path / "log", body_timeout_s=0.3) as (server, _):
        head = part("purpose", b"batch") + part("file", b"x" * 100_000, "a")
        for leaves in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.putrequest("POST", "/v1/files")
            connection.putheader("content-type", f"multipart/form-data; boundary={BOUNDARY}")
            connection.putheader("content-length", "1000000")
            connection.endheaders(head)
            if leaves:
                time.sleep(0.1)
                connection.close()
            else:
                assert connection.getresponse().status == 408
                connection.close()
        end = time.monotonic() + 5
        while folder_of(server):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not server.storage.files._taken.total()


def test_expired_files_are_deleted_unless_a_batch_uses_them(tmp_path):
    now = [1_000_000.0]
    with batching(tmp_path / "log", storage={"clock": lambda: now[0]}) as (server, client):
        expires = {"anchor": "created_at", "seconds": 3600}
        file = client.files.create(file=("a", b"x"), purpose="vision", expires_after=expires)
        kept = client.files.create(file=("b", b"x"), purpose="vision")
        assert file.expires_at == 1_003_600 and kept.expires_at is None
        now[0] += 3601
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert [each.id for each in client.files.list()] == [kept.id]
        asyncio.run_coroutine_threadsafe(server.storage.sweep(), server.loop).result(10)
        assert folder_of(server) == [kept.id]


def test_incomplete_uploads_are_removed_at_startup(tmp_path):
    with batching(tmp_path / "log") as (server, client):
        kept = client.files.create(file=("a", b"x"), purpose="vision")
        lost = client.files.create(file=("b", b"x"), purpose="vision")
        folder = server.storage.files.folder
    (folder / f"file-{'0' * 24}{PART}").write_bytes(b"half")
    (folder / f"file-{'1' * 24}").write_bytes(b"no row")
    (folder / lost.id).unlink()
    with batching(tmp_path / "log", engine_options={"resume": Resume()}) as (server, client):
        assert folder_of(server) == [kept.id]
        assert [each.id for each in client.files.list()] == [kept.id]


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    with batching(tmp_path / "log") as (server, client):
        real = os.fdopen

        def full(fd, *mode):
            file = real(fd, *mode)
            return Failing(file)

        monkeypatch.setattr(files.os, "fdopen", full)
        with pytest.raises(openai.InternalServerError, match="No space left") as refused:
            client.files.create(file=("a", b"x" * 1000), purpose="vision")
        assert refused.value.status_code == 503 and refused.value.code == "storage_failed"
        monkeypatch.undo()
        assert folder_of(server) == []
        assert client.files.create(file=("a", b"x" * 1000), purpose="vision").bytes == 1000


def test_a_key_has_its_share(tmp_path):
    (tmp_path / "keys").write_text("mine\nyours\n")
    options = {"key_file": tmp_path / "keys", "files_bytes": 4096}
    with batching(tmp_path / "log", key="mine", **options) as (server, client):
        client.files.create(file=("a", b"x" * 2000), purpose="vision")
        with pytest.raises(openai.BadRequestError, match="key_share"):
            client.files.create(file=("a", b"x" * 100), purpose="vision")
        assert client_of(server, "yours").files.create(file=("a", b"x" * 2000), purpose="vision")


def test_running_uploads_count_in_a_keys_share(tmp_path):
    (tmp_path / "keys").write_text("mine\nyours\n")
    waiting = []

    def begin(key):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.putrequest("POST", "/v1/files")
        for name, value in (
            ("content-type", f"multipart/form-data; boundary={BOUNDARY}"),
            ("content-length", "1000"),
            ("authorization", f"Bearer {key}"),
        ):
            connection.putheader(name, value)
        connection.endheaders(b"--xyz\r\n")
        waiting.append(connection)
        return connection

    with batching(tmp_path / "log", key="mine", key_file=tmp_path / "keys") as (server, client):
        for _ in range(8):
            begin("mine")
        wait_for(lambda: uploads(server) == 8)
        answer = begin("mine").getresponse()
        assert answer.status == 429 and answer.headers["retry-after"] == "1"
        assert client_of(server, "yours").files.create(file=("a", b"x"), purpose="vision")
        for connection in waiting:
            connection.close()
        wait_for(lambda: not uploads(server))
        assert client.files.create(file=("a", b"x"), purpose="vision")

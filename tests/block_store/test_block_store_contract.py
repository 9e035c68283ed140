"""Tests the rules for every block store, and damaged or foreign files in a folder store."""

import os
import threading

import pytest

from mmengine.block_store.folder import FolderStore
from mmengine.block_store.registry import BLOCK_STORES
from mmengine.block_store.sealed import SEAL_BYTES, opened, seal
from mmengine.errors import ConfigError


@pytest.fixture(params=BLOCK_STORES.names())
def make(request, tmp_path):
    """Return a function that opens a further store in the same folder."""
    return lambda size=2**20: BLOCK_STORES.load(request.param)(str(tmp_path / "store"), size)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(store, number: int, value: bytes) -> None:
    store.put([key(number)], [[memoryview(value[:3]), memoryview(value[3:])]])


def got(store, number: int, size: int) -> bytes | None:
    buffer = bytearray(size)
    (found,) = store.get([key(number)], [memoryview(buffer)])
    return bytes(buffer) if found else None


def test_values_are_visible_to_every_store_of_the_folder(make):
    store, other = make(), make()
    put(store, 1, b"a value of some bytes")
    assert store.has([key(1), key(2)]) == [True, False]
    for each in (store, other, make()):
        assert got(each, 1, 21) == b"a value of some bytes"
        assert got(each, 2, 21) is None


def test_a_value_is_returned_only_if_it_fills_the_buffer(make):
    store = make()
    put(store, 1, b"abcdef")
    assert got(store, 1, 5) is None and got(store, 1, 7) is None and got(store, 1, 6) == b"abcdef"


def test_a_key_keeps_its_first_value_until_it_is_removed(make):
    store = make()
    put(store, 1, b"first!")
    put(store, 1, b"second")
    assert got(store, 1, 6) == b"first!"
    store.remove([key(1), key(9)])
    assert got(store, 1, 6) is None and store.has([key(1)]) == [False]
    put(store, 1, b"second")
    assert got(store, 1, 6) == b"second"


def test_the_least_recently_used_values_are_deleted(make):
    store = make(10_000)
    for number in range(9):
        put(store, number, bytes(1000))
    for number in (0, 3):
        assert got(store, number, 1000) is not None
    for number in range(9, 13):
        put(store, number, bytes(1000))
    held = [number for number in range(13) if got(store, number, 1000) is not None]
    assert {0, 3, 12} <= set(held) and 1 not in held and 7 <= len(held) <= 10
    put(store, 99, bytes(20_000))  # larger than the store's limit
    assert got(store, 99, 20_000) is None and got(store, 12, 1000) is not None


def test_several_threads_put_and_get(make):
    store = make(2**24)

    def work(first: int) -> None:
        for number in range(40):
            put(store, number, bytes([number]) * 500)
            assert got(store, number, 500) in (None, bytes([number]) * 500)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(got(store, number, 500) == bytes([number]) * 500 for number in range(40))


def test_a_seal_holds_for_one_key_and_every_byte():
    payload = memoryview(bytes(range(64)))
    value = bytes(seal(b"key", payload)) + payload
    assert opened(b"key", memoryview(value)) is not None
    assert opened(b"kez", memoryview(value)) is None
    for place in range(len(value)):
        spoiled = bytearray(value)
        spoiled[place] ^= 1
        assert opened(b"key", memoryview(spoiled)) is None, place
    assert opened(b"key", memoryview(bytes(SEAL_BYTES + 64))) is None


def test_foreign_files_count_as_missing_and_never_block(tmp_path):
    store = FolderStore(str(tmp_path), 2**20)
    put(store, 1, b"abcdef")
    path = store._path(key(1))
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    for make_it in (
        lambda: path.symlink_to(secret),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: path.write_bytes(b"abc"),
        lambda: None,
    ):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        make_it()
        assert got(store, 1, 6) is None
    (tmp_path / "ff").write_bytes(b"a file where a folder of values would be")
    put(store, 1, b"abcdef")
    store._room = 0
    put(store, 2, b"abcdef")
    assert got(store, 1, 6) == b"abcdef"


def test_engines_that_share_a_folder_overfill_it_by_a_tenth_each_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    most, size, num_engines, peak = 40_000, 1000, 6, 0
    stores = [FolderStore(str(tmp_path), most) for _ in range(num_engines)]
    for number in range(240):
        put(stores[number % num_engines], number, bytes(size))
        if number % 5 == 0:
            peak = max(peak, sum(path.stat().st_size for path in tmp_path.glob("*/*")))
    assert most / 2 < peak <= most + num_engines * (most / 10 + size)


def test_a_full_or_missing_disk_is_no_error(tmp_path, monkeypatch):
    store = FolderStore(str(tmp_path / "store"), 2**20)
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    put(store, 1, b"abcdef")
    assert got(store, 1, 6) is None and not list((tmp_path / "store").rglob("*.part"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"block_store_path .*file/below cannot be used.*name a writable folder"
    ):
        FolderStore(str(tmp_path / "file" / "below"), 2**20)

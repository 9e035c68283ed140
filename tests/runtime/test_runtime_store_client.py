"""Tests the block store's client threads: aborted requests cause no reads, and store errors do not end a
thread.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmengine.block_store.sealed import seal
from mmengine.config import EngineConfig
from mmengine.encoder_cache.cache import encoder_key
from mmengine.runtime.kv import store_client
from mmengine.runtime.kv.features_store import FetchedFeatures
from mmengine.runtime.kv.store_client import StoreClient
from tests.core.small_engine import image, request

WIDTH, BLOCK = 8, 4
PATIENCE_S = 20


class HeldUp:
    """A store in memory. `at`: the method whose calls wait until `gate` is set."""

    def __init__(self, at: str = ""):
        self.at, self.gate, self.is_there = at, threading.Event(), threading.Event()
        self.values: dict[bytes, bytes] = {}
        self.num_read = 0

    def _wait(self, call: str) -> None:
        if call == self.at:
            self.is_there.set()
            assert self.gate.wait(PATIENCE_S)

    def has(self, keys):
        self._wait("has")
        return [key in self.values for key in keys]

    def put(self, keys, values):
        for key, pieces in zip(keys, values, strict=True):
            self.values[key] = b"".join(bytes(piece) for piece in pieces)

    def get(self, keys, buffers):
        self.num_read += 1
        self._wait("get")
        for key, buffer in zip(keys, buffers, strict=True):
            buffer[:] = self.values[key]
        return [True]

    def remove(self, keys):
        """Do nothing."""

    def close(self):
        """Do nothing."""


@pytest.fixture
def client_of():
    """Return a function that takes a store, and returns a client and the list of events that the client
    reports.
    """
    made = []

    def make(store):
        pool = SimpleNamespace(blocks=torch.zeros(1, 4, 2, BLOCK, 1, 4))
        config = EngineConfig(block_size=BLOCK, num_blocks=64, max_model_len=64)
        features = FetchedFeatures(WIDTH, torch.float32, torch.device("cpu"))
        client, told = StoreClient(store, pool, config, {"weights": "w"}, features), []
        client.connect(told.append)
        made.append(client)
        return client, told

    yield make
    for client in made:
        client.close()


def looking(name: str, tag: int = 1, length: int = 12):
    return request(name, length, media=[image(tag, 2, 6)])


def ask(client, one):
    client.ask(one, one.prompt_token_ids)


def keep_features(client, *requests):
    for one in requests:
        (item,) = one.media
        client.store_features(encoder_key(item.mm_hash, "", None), torch.ones(item.num_embeds, WIDTH))
    until(lambda: client.num_put == len(requests))


def until(is_so):
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("at", ["has", "get"])
def test_an_aborted_request_leaves_no_features_and_no_reads(client_of, at):
    store = HeldUp(at)
    client, told = client_of(store)
    requests = [looking(f"r{number}", number) for number in range(5)]
    keep_features(client, *requests)
    for one in requests:
        ask(client, one)
    assert store.is_there.wait(PATIENCE_S)
    for one in requests[:-1]:
        client.forget(one.request_id)
    store.gate.set()
    until(lambda: told)
    assert [(event.request_id, len(event.items)) for event in told] == [("r4", 1)]
    # The last request's features are read. With "get", the read for the first request began before the abort.
    assert store.num_read == (2 if at == "get" else 1)
    client.forget("r4")
    assert client._features._bytes == 0 and not client._features._came


def test_a_reused_id_gets_no_events_of_its_predecessor(client_of):
    store = HeldUp("get")
    client, told = client_of(store)
    before, after = looking("r", 1), looking("r", 2)
    keep_features(client, before, after)
    ask(client, before)
    assert store.is_there.wait(PATIENCE_S)
    client.forget("r")
    ask(client, after)
    store.gate.set()
    until(lambda: told)
    (item,) = after.media
    assert list(client._features._came) == [encoder_key(item.mm_hash, "", None)] and len(told) == 1


def test_a_fetch_reads_for_the_current_request(client_of):
    """The fetch of an aborted request is not reported to a later request with the same id."""
    store = HeldUp("get")
    client, told = client_of(store)
    one = request("r", 12)
    for digest in store_client.prompt_digests(one, one.prompt_token_ids, BLOCK):
        key, payload = client._kv_names + digest, memoryview(bytes(client._row_bytes))
        store.put([key], [[seal(key, payload), payload]])
    ask(client, one)
    until(lambda: told)
    assert told.pop().num_blocks == 2
    client.fetch("r", 0, 2)
    assert store.is_there.wait(PATIENCE_S)
    client.forget("r")
    ask(client, one)
    store.gate.set()
    until(lambda: told)
    assert [type(event).__name__ for event in told] == ["Offered"] and not client._offered
    client.fetch("r", 0, 2)
    until(lambda: len(told) > 1)
    assert len(told[1].digests) == 16


class Panic(BaseException):
    """Simulates a panic in a Rust extension. Like pyo3's exception, this class does not derive from
    Exception.
    """


def panicking(keys):
    raise Panic


class NoAnswer:
    def __bool__(self):
        raise ValueError("neither")


STRANGE = {
    "a number": lambda keys: 7,
    "an array": lambda keys: np.zeros(5, bool),
    "neither": lambda keys: [NoAnswer() for _ in keys],
    "a panic": panicking,
    "too many": lambda keys: [False] * 99,
}


@pytest.mark.parametrize("how", STRANGE)
def test_a_store_with_invalid_answers_counts_as_failed(client_of, how):
    store = HeldUp()
    store.has, store.get = STRANGE[how], lambda keys, buffers: STRANGE[how](keys)
    client, told = client_of(store)
    for name in ("a", "b"):
        ask(client, looking(name))
        until(lambda: told)
        (offered,) = told
        assert (offered.request_id, offered.num_blocks, offered.items) == (name, 0, ())
        told.clear()
    assert all(thread.is_alive() for thread in client._threads)


def test_a_store_offers_no_more_than_requested(client_of):
    store = HeldUp()
    store.has = lambda keys: [True] * 99
    client, told = client_of(store)
    one = request("a", 12)
    ask(client, one)
    until(lambda: told)
    assert told[0].num_blocks == (12 - 1) // BLOCK


def test_a_failing_request_ends_no_thread(client_of, monkeypatch, capsys):
    client, told = client_of(HeldUp())
    monkeypatch.setattr(store_client, "prompt_digests", lambda *args: 1 / 0)
    ask(client, looking("a"))
    until(lambda: "ZeroDivisionError" in capsys.readouterr().err)
    monkeypatch.undo()
    ask(client, looking("b"))
    until(lambda: told)
    assert told[0].request_id == "b"

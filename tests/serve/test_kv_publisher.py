"""Tests KV events over ZeroMQ: batches in vLLM's frames, and replays for clients."""

import threading
import time
from contextlib import closing

import msgspec
import pytest

from mmengine.core import continuation
from mmengine.core.continuation import open_log
from mmengine.core.resume import Resume
from mmengine.errors import ConfigError, CorruptLog
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay.kv_events.batches import batches
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import Bench, request, settings_of

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
publisher_of = pytest.importorskip("mmengine.serve.requests.kv_publisher")
ANYWHERE = "tcp://127.0.0.1:0"


@pytest.fixture
def bench(tmp_path):
    bench = Bench(sink=LogWriter(tmp_path))
    bench.new_events = list
    yield bench
    bench.core.close()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Run a publisher on a thread, and yield a subscriber socket and a socket for replay requests."""
    monkeypatch.setattr(publisher_of, "MAX_RECENT", 3)
    publisher, over = (
        publisher_of.KvPublisher(tmp_path, ANYWHERE, ANYWHERE, "kv@pod@model"),
        threading.Event(),
    )
    published, answered = publisher.endpoints
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
        for socket, endpoint in ((sub, published), (dealer, answered)):
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
        sub.setsockopt(zmq.SUBSCRIBE, b"kv@pod")
        thread = threading.Thread(target=publisher.run, args=(lambda: not over.is_set(),))
        thread.start()
        yield sub, dealer
        over.set()
        thread.join()
    publisher.close()


def replayed(dealer, first: int) -> list[tuple[int, bytes]]:
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        empty, topic, seq, payload = dealer.recv_multipart()
        assert (empty, topic) == (b"", b"kv@pod@model")
        if seq == publisher_of.END:
            assert payload == b""
            return found
        found.append((int.from_bytes(seq, "big"), payload))


def wholly_published(dealer, folder) -> list[tuple[int, bytes]]:
    """Return all batches of a log once they are published."""
    whole = [(batch.seq, batch.payload) for batch in batches(folder)]
    until = time.monotonic() + 20
    while replayed(dealer, len(whole) - 1) != whole[-1:]:
        assert time.monotonic() < until
    return whole


def test_published_batches_follow_the_log_and_can_be_requested_again(bench, served, tmp_path):
    sub, dealer = served
    bench.submit(request("a", 14, max_tokens=20))
    bench.run()
    whole = [(batch.seq, batch.payload) for batch in batches(tmp_path)]
    assert len(whole) > 5  # three of them are kept in memory
    heard = []
    while not heard or heard[-1][0] < len(whole) - 1:
        topic, seq, payload = sub.recv_multipart()
        assert topic == b"kv@pod@model"
        heard.append((int.from_bytes(seq, "big"), payload))
    assert heard == whole[-len(heard) :]  # a late subscriber has missed some
    for first in (0, 1, len(whole) - 2, len(whole)):
        assert replayed(dealer, first) == whole[first:]
    dealer.send_multipart((b"", b"?"))  # never answered
    dealer.send_multipart((b"what",))
    assert replayed(dealer, 1) == whole[1:]


@pytest.fixture
def core(tmp_path, monkeypatch):
    """Yield an engine core with log retention."""
    monkeypatch.setattr(continuation, "MIN_PART_BYTES", 2000)
    config = settings_of(log_retain_bytes=15_000)
    core = open_log(tmp_path, Resume(), config, reserve_bytes=0).core(config, SimulatedExecutor(config), {})
    yield core
    core.close()


def answer(core, numbers: range) -> None:
    for number in numbers:
        core.submit(request(f"r{number}", 5 + number % 9, max_tokens=9))
        while core.has_work:
            core.step()
        core.delivered(f"r{number}")
    core.step()


def told(payload: bytes):
    """Return a batch's events without its time, which may change if the log's first segment is deleted."""
    return msgspec.msgpack.decode(payload)[1]


def tidy(core, folder) -> None:
    """Wait until retention deletes the log's beginning."""
    until = time.monotonic() + 20
    while not LogReader(folder).first_sequence:
        assert time.monotonic() < until
        core.sink._tidy_at = 0.0
        core.tidy()


def heard_until(sub, last: bytes) -> list[tuple[int, bytes]]:
    """Return the published batches up to the batch `last`."""
    heard = []
    while not heard or told(heard[-1][1]) != told(last):
        _, seq, payload = sub.recv_multipart()
        heard.append((int.from_bytes(seq, "big"), payload))
    return heard


def test_batches_keep_their_numbers_when_the_log_loses_its_beginning(core, served, tmp_path):
    """The running publisher continues its numbers. If the shortened log is read again, batches get higher
    numbers.
    """
    sub, dealer = served
    answer(core, range(40))
    whole = wholly_published(dealer, tmp_path)
    assert replayed(dealer, 0) == whole
    tidy(core, tmp_path)
    assert replayed(dealer, 0) == replayed(dealer, len(whole) - 3) == whole[-3:]  # the batches in memory

    answer(core, range(40, 50))
    first, *kept = [(batch.seq, batch.payload) for batch in batches(tmp_path)]
    then = heard_until(sub, kept[-1][1])[-len(kept) :]
    assert 3 < len(kept) < len(whole)
    assert [told(payload) for _, payload in kept] == [told(payload) for _, payload in then]
    assert all(now > before for (now, _), (before, _) in zip(kept, then, strict=True))
    with closing(publisher_of.KvPublisher(tmp_path, ANYWHERE)) as anew:
        anew.run(lambda: False)
        assert list(anew._since(0)) == [first, *kept]


def test_a_request_during_retention_gets_the_rest_and_the_end(bench, served, tmp_path, monkeypatch):
    # If retention deletes segments during a replay, the client gets the batches that were read, and the
    # batches in memory.
    _, dealer = served
    bench.submit(request("a", 14, max_tokens=20))
    bench.run()
    whole = wholly_published(dealer, tmp_path)

    def cut(folder, *, until):
        yield from list(batches(folder, until=2))
        raise CorruptLog("record 9 is missing")

    monkeypatch.setattr(publisher_of, "batches", cut)
    assert replayed(dealer, 0) == whole[:2] + whole[-3:]


class Dripping:
    """A ROUTER socket with a slow receiver, which reads a message every `drip_s` seconds."""

    def __init__(self, drip_s: float):
        self.drip_s, self.num_sent = drip_s, 0

    def recv_multipart(self):
        return [b"asker", b"", bytes(8)]

    def send_multipart(self, frames, flags=0):
        if flags & zmq.NOBLOCK:
            raise zmq.Again
        time.sleep(self.drip_s)
        self.num_sent += 1


def test_a_slow_receiver_does_not_delay_publication(bench, tmp_path, monkeypatch):
    """A receiver that needs 20 ms for each message gets three messages, and its replay ends after 50 ms."""
    monkeypatch.setattr(publisher_of, "REPLAY_WAIT_MS", 50)
    bench.submit(request("a", 14, max_tokens=40))
    bench.run()
    dripping = Dripping(0.02)
    with closing(publisher_of.KvPublisher(tmp_path, ANYWHERE)) as publisher:
        publisher.run(lambda: False)
        assert len(list(publisher._since(0))) > 8
        publisher._answer(dripping)
    assert dripping.num_sent == 3


def test_an_endpoint_that_cannot_be_bound_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"KV events cannot be published at udp.*tcp://\*:5557"):
        publisher_of.KvPublisher(tmp_path, "udp//nowhere")

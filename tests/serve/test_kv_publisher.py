"""KV events over ZeroMQ: the frames of vLLM, and batches that are asked for again."""

import threading

import pytest

from mmengine.errors import ConfigError
from mmengine.events.log import LogWriter
from mmengine.replay.kv_events.batches import batches
from tests.core.small_engine import Bench, request

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
publisher_of = pytest.importorskip("mmengine.serve.kv_publisher")
ANYWHERE = "tcp://127.0.0.1:0"


@pytest.fixture
def bench(tmp_path):
    bench = Bench(sink=LogWriter(tmp_path))
    bench.new_events = list
    yield bench
    bench.core.close()


@pytest.fixture
def served(bench, tmp_path, monkeypatch):
    """A publisher on a thread, one who subscribes and one who asks."""
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


def test_what_is_published_is_what_the_log_says_and_any_of_it_can_be_asked_for_again(bench, served, tmp_path):
    sub, dealer = served
    bench.submit(request("a", 14, max_tokens=20))
    bench.run()
    whole = [(batch.seq, batch.payload) for batch in batches(tmp_path)]
    assert len(whole) > 5  # of which three are kept in memory
    heard = []
    while not heard or heard[-1][0] < len(whole) - 1:
        topic, seq, payload = sub.recv_multipart()
        assert topic == b"kv@pod@model"
        heard.append((int.from_bytes(seq, "big"), payload))
    assert heard == whole[-len(heard) :]  # who subscribes late has missed some
    for first in (0, 1, len(whole) - 2, len(whole)):
        assert replayed(dealer, first) == whole[first:]
    dealer.send_multipart((b"", b"?"))  # nobody answers
    dealer.send_multipart((b"what",))
    assert replayed(dealer, 1) == whole[1:]


def test_an_endpoint_that_cannot_be_bound_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"KV events cannot be published at udp.*tcp://\*:5557"):
        publisher_of.KvPublisher(tmp_path, "udp//nowhere")

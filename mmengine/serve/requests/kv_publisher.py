"""Publishes KV cache events over ZeroMQ in vLLM's format, from a process that reads the engine's log.

Routers use the events to send a request to an engine that has cached the request's prefix. The sockets are:

    PUB      (topic, number of the batch in 8 bytes, payload)
    ROUTER   answers the request (empty, first number) with a message (empty, topic, number, payload) for
             each batch from the first number on, and a last message with the number -1

Batches and their numbers are computed from the log alone. A subscriber can therefore request batches from any
number onwards, even after the engine or this process has restarted. If retention has deleted the log's
beginning, only the batches in memory are available.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import zmq

from mmengine.errors import ConfigError, MMEngineError
from mmengine.replay.kv_events.batches import Numbered, batches
from mmengine.serve.requests.operator_log import operator_log

MAX_QUEUED = 100_000  # a subscriber that lags by more batches loses batches, as in vLLM
MAX_RECENT = 10_000  # number of latest batches that are kept in memory for replays
MAX_ASKED = 64  # maximum size of a frame in a replay request, in bytes
# How long to wait for a subscriber that does not read its replay. Nothing is published meanwhile.
REPLAY_WAIT_MS = 1000
POLL_MS = 20  # interval between two reads of the log, in ms
END = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """Publishes batches on the endpoint `publish`, and answers replay requests on the endpoint `replay`.

    An endpoint is an address such as tcp://*:5557. Without `replay`, batches cannot be requested again. Every
    message begins with `topic`. Raises ConfigError for an endpoint that cannot be bound.
    """

    def __init__(self, folder: Path, publish: str, replay: str = "", topic: str = ""):
        self._folder, self._topic = folder, topic.encode()
        self._recent: deque[Numbered] = deque(maxlen=MAX_RECENT)
        self._first = 0  # number of the first batch that this process published
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pub = self._bound(zmq.PUB, publish)
        self._router = self._bound(zmq.ROUTER, replay) if replay else None

    def _bound(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED)
            # Without this option, ZeroMQ drops messages when the queue is full.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDTIMEO, REPLAY_WAIT_MS)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"KV events cannot be published at {endpoint}: {error}; give an endpoint such as tcp://*:5557"
            ) from None
        return socket

    @property
    def endpoints(self) -> tuple[str, str]:
        """The endpoints for publishing and for replays, with the actual port numbers."""
        bound = [self._pub.getsockopt_string(zmq.LAST_ENDPOINT)]
        bound.append("" if self._router is None else self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        return bound[0], bound[1]

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Publish batches until `goes_on` returns False.

        `goes_on` is called when there is nothing to publish. Raises LogError, CorruptLog.
        """

        def wait() -> bool:
            if self._router is None:
                time.sleep(POLL_MS / 1000)
            elif self._router.poll(POLL_MS):
                self._answer(self._router)
            return goes_on()

        for batch in batches(self._folder, wait):
            if not self._recent:
                self._first = batch.seq
            self._recent.append(batch)
            self._pub.send_multipart((self._topic, batch.seq.to_bytes(8, "big"), batch.payload))

    def _answer(self, router: "zmq.Socket[bytes]") -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # an invalid request; vLLM does not answer it either
        asker, first = frames[0], int.from_bytes(frames[2], "big")
        left_s = REPLAY_WAIT_MS / 1000
        answers = ((batch.seq.to_bytes(8, "big"), batch.payload) for batch in self._since(first))
        try:
            for seq, payload in chain(answers, [(END, b"")]):
                left_s = _sent(router, (asker, b"", self._topic, seq, payload), left_s)
        except zmq.ZMQError as error:
            operator_log.warning("a subscriber to KV events has left, or does not read", reason=str(error))

    def _since(self, first: int) -> Iterator[Numbered]:
        """Yield the published batches that are still available, beginning with number `first`."""
        recent = self._recent
        if recent and first < recent[0].seq:
            yield from self._read_again(first, recent[0].seq)
        yield from (batch for batch in recent if batch.seq >= first)

    def _read_again(self, first: int, until: int) -> Iterator[Numbered]:
        """Yield batches before number `until` from the log.

        Yields no batches if the log's beginning was deleted.
        """
        older = batches(self._folder, until=until)
        try:
            head = next(older, None)
            if head is not None and head.seq == self._first:
                yield from (batch for batch in chain([head], older) if batch.seq >= first)
        except MMEngineError as error:  # retention deleted a log segment meanwhile
            operator_log.warning("KV events cannot be read again", reason=str(error))

    def close(self) -> None:
        self._context.destroy(0)


def _sent(router: "zmq.Socket[bytes]", frames: tuple[bytes, ...], left_s: float) -> float:
    """Send a message in a replay, and return the receiver's remaining time. `left_s`: the remaining time
    before this message, in seconds.

    Raises ZMQError if the receiver has left or its time is over. The time is limited because a slow receiver
    delays all other subscribers.
    """
    try:
        router.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        began = time.monotonic()
        router.send_multipart(frames)
        left_s -= time.monotonic() - began
        if left_s < 0:
            raise
    return left_s

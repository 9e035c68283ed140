"""Tells routers what is in the KV cache, by ZeroMQ, as vLLM does: a process beside the engine reads its log.

    PUB      (topic, number of the batch in 8 bytes, payload)
    ROUTER   asked with (empty, first number): (empty, topic, number, payload) for each batch since then, and
             at the end number -1

Numbers follow from the log, and so does every batch: what a subscriber asks for again is read from the disk,
from any number on, also after the engine or this process was started again. Once retention let the beginning
of the log go, it is what memory holds.
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

MAX_QUEUED = 100_000  # batches that a subscriber may be behind before it loses some, as in vLLM
MAX_RECENT = 10_000  # batches that are answered from memory
MAX_ASKED = 64  # bytes of a frame of a request
REPLAY_WAIT_MS = 1000  # for a subscriber that does not read what it asked for: nothing is published meanwhile
POLL_MS = 20  # how late a batch may be told
END = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """`publish`, `replay`: endpoints to bind, as tcp://*:5557; without `replay` nobody can ask again.
    `topic`: what each message begins with. Raises ConfigError for an endpoint that cannot be bound."""

    def __init__(self, folder: Path, publish: str, replay: str = "", topic: str = ""):
        self._folder, self._topic = folder, topic.encode()
        self._recent: deque[Numbered] = deque(maxlen=MAX_RECENT)
        self._first = 0  # the number of the first batch that was published
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pub = self._bound(zmq.PUB, publish)
        self._router = self._bound(zmq.ROUTER, replay) if replay else None

    def _bound(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what does not fit its queue is dropped
            socket.setsockopt(zmq.SNDTIMEO, REPLAY_WAIT_MS)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"KV events cannot be published at {endpoint}: {error}; give an endpoint as tcp://*:5557"
            ) from None
        return socket

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where it publishes, and where it answers; with the ports that the system chose."""
        bound = [self._pub.getsockopt_string(zmq.LAST_ENDPOINT)]
        bound.append("" if self._router is None else self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        return bound[0], bound[1]

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Until `goes_on` says no; it is asked when there is nothing to tell. Raises LogError, CorruptLog."""

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
            return  # nobody whom vLLM would answer
        asker, first = frames[0], int.from_bytes(frames[2], "big")
        left_s = REPLAY_WAIT_MS / 1000
        answers = ((batch.seq.to_bytes(8, "big"), batch.payload) for batch in self._since(first))
        try:
            for seq, payload in chain(answers, [(END, b"")]):
                left_s = _sent(router, (asker, b"", self._topic, seq, payload), left_s)
        except zmq.ZMQError as error:
            operator_log.warning("a subscriber to KV events left, or does not read", reason=str(error))

    def _since(self, first: int) -> Iterator[Numbered]:
        """All that was published from that number on, as far as it can be had with the number that it had."""
        recent = self._recent
        if recent and first < recent[0].seq:
            yield from self._read_again(first, recent[0].seq)
        yield from (batch for batch in recent if batch.seq >= first)

    def _read_again(self, first: int, until: int) -> Iterator[Numbered]:
        """From the disk; nothing where the log begins elsewhere than it did, for it counts from there."""
        older = batches(self._folder, until=until)
        try:
            head = next(older, None)
            if head is not None and head.seq == self._first:
                yield from (batch for batch in chain([head], older) if batch.seq >= first)
        except MMEngineError as error:  # of the log a part was given up meanwhile
            operator_log.warning("KV events cannot be read again", reason=str(error))

    def close(self) -> None:
        self._context.destroy(0)


def _sent(router: "zmq.Socket[bytes]", frames: tuple[bytes, ...], left_s: float) -> float:
    """Send a part of an answer, and give how long its asker may still be waited for. Raises ZMQError where it
    left, or that is over: who reads slowly, and not only who does not read, would hold up all others."""
    try:
        router.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        began = time.monotonic()
        router.send_multipart(frames)
        left_s -= time.monotonic() - began
        if left_s < 0:
            raise
    return left_s

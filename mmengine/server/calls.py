"""Calls that go on when their client leaves, and those of the process before: who may have their answers.

A call with a key (the header Idempotency-Key, or a request id of its caller's own) is kept for a time. The
same key with the same body has its answer from the beginning; so has, once, a client that tries again what
the process before had accepted.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from mmengine.serve.async_engine import AsyncEngine
from mmengine.serve.left import Left
from mmengine.serve.operators import operator_log
from mmengine.serve.record import News, Reader, Record
from mmengine.serve.stream import Stream
from mmengine.server.asked import Asked, Envelope
from mmengine.server.asking import ask, log_id
from mmengine.server.callers import IDEMPOTENCY_KEY, ITS_ID, Caller, Key
from mmengine.server.errors import ApiError

MAX_KEPT_OUTPUTS = 2**18  # of answers that nobody reads any more; the oldest go
_OUTPUTS_OF_A_CALL = 16  # as many as a call takes beside them


class Orphan(NamedTuple):
    """A call of the process before. `left`: its prompts in order."""

    envelope: Envelope
    request_id: str
    left: list[Left]

    def is_of(self, envelope: Envelope, keys: list[Key], caller: Caller) -> bool:
        """Whether a call with this envelope, of this caller, may have it."""
        mine = self.envelope
        if mine.owner != envelope.owner:
            return False
        if any(
            key in ((mine.owner, IDEMPOTENCY_KEY, mine.key), (mine.owner, ITS_ID, self.request_id))
            for key in keys
        ):
            return True
        may_claim = (
            caller.tries_again or mine.is_stream
        )  # of a stream that broke no client tries again by itself
        return may_claim and not mine.key and mine.digest == envelope.digest


class Call:
    """One that goes on when its client leaves."""

    def __init__(self, asked: Asked, streams: Sequence[Stream], calls: "Calls", keys: list[Key]):
        self.asked, self.keys, self._calls = asked, keys, calls
        self._streams = streams
        self._records = [Record(stream) for stream in streams]
        self._num_readers = 0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_live(self) -> bool:
        """Whether a client listens."""
        return bool(self._num_readers)

    @property
    def num_outputs(self) -> int:
        return sum(len(record.items) for record in self._records)

    @property
    def is_good(self) -> bool:
        """Whether it was accepted, and did not fail."""
        return all(stream.is_accepted for stream in self._streams) and not any(
            record.error for record in self._records
        )

    def readers(self) -> list[News]:
        if self.timer is not None:
            self.timer.cancel()
        self._num_readers = len(self._records)
        return [Reader(record, self._left) for record in self._records]

    def _left(self) -> None:
        self._num_readers -= 1
        if not self._num_readers:
            self._calls.unattended(self)

    def let_go(self) -> None:
        """Nobody will ask for it: what runs is cancelled."""
        if self.timer is not None:
            self.timer.cancel()
        for stream in self._streams:
            stream.cancel()
            stream.delivered()


class Calls:
    """`reattach_s`: for which a call is kept that nobody listens to, and for which those of the process
    before are. Belongs to the event loop on which it is made."""

    def __init__(self, engine: AsyncEngine, reattach_s: float):
        self._engine, self._reattach_s = engine, reattach_s
        self._calls: dict[Key, Call] = {}
        self._unread: dict[Call, int] = {}  # outputs of those that nobody listens to, the oldest first
        self._num_unread = 0  # outputs
        self._orphans = orphans_of(engine.left())
        if engine.left():
            asyncio.get_running_loop().call_later(reattach_s, self._forget_orphans)

    def sources(self, asked: Asked, caller: Caller) -> tuple[Asked, Sequence[News]]:
        """Where the answers to a call come from, and the call as it was accepted first. Raises ApiError where
        its key is taken, and InvalidRequest, QueueFull."""
        keys = caller.keys(asked.envelope.owner, asked.request_id)
        for key in keys:
            if (call := self._calls.get(key)) is not None:
                if call.is_live:
                    raise _in_use(key)
                if call.asked.envelope.digest != asked.envelope.digest:
                    raise _other_body(key)
                self._num_unread -= self._unread.pop(call, 0)
                return _as_accepted(asked, call.asked.request_id, call.asked.envelope), call.readers()
        orphan = next((one for one in self._orphans if one.is_of(asked.envelope, keys, caller)), None)
        if orphan is not None:
            if orphan.envelope.digest != asked.envelope.digest:
                raise _other_body(keys[0])
            self._orphans.remove(orphan)
            asked = _as_accepted(asked, orphan.request_id, orphan.envelope)
            attached = [self._engine.attach(one.request_id, hold=bool(keys)) for one in orphan.left]
            return asked, self._kept(asked, attached, keys) if keys else attached
        streams = ask(self._engine, asked, hold=bool(keys))
        return asked, self._kept(asked, streams, keys) if keys else streams

    def kept(self) -> list[Call]:
        """Those that go on without their client, or would, in the order in which they came."""
        return list(dict.fromkeys(self._calls.values()))

    def _kept(self, asked: Asked, streams: Sequence[Stream], keys: list[Key]) -> list[News]:
        call = Call(asked, streams, self, keys)
        self._calls.update(dict.fromkeys(keys, call))
        return call.readers()

    def unattended(self, call: Call) -> None:
        """Its client left, with or without its answer."""
        if not call.is_good or not self._reattach_s:
            self._forget(call)
            return
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(self._reattach_s, self._forget, call)
        self._unread[call] = call.num_outputs + _OUTPUTS_OF_A_CALL
        self._num_unread += self._unread[call]
        while self._num_unread > MAX_KEPT_OUTPUTS:
            self._forget(next(iter(self._unread)))

    def _forget(self, call: Call) -> None:
        call.let_go()
        self._num_unread -= self._unread.pop(call, 0)
        for key in call.keys:
            self._calls.pop(key, None)

    def _forget_orphans(self) -> None:
        orphans, self._orphans = self._orphans, []
        for one in self._engine.left():
            self._engine.give_up(one.request_id)
        if orphans:
            operator_log.info("nobody asked for calls of the process before", calls=len(orphans))


def orphans_of(left: Iterable[Left]) -> list[Orphan]:
    """The calls that are whole: nobody was told that one was accepted which lacks a prompt."""
    found: dict[str, dict[int, tuple[Envelope, Left]]] = {}
    for one in left:
        try:
            envelope = msgspec.json.decode(one.envelope, type=Envelope)
        except msgspec.MsgspecError:
            continue
        prefix = f"{envelope.owner}:" if envelope.owner else ""
        name = one.request_id.removeprefix(prefix)
        if envelope.num_prompts > 1:
            name = name.removesuffix(f"-{envelope.place}")
        if log_id(envelope, name, envelope.place) == one.request_id:
            found.setdefault(f"{prefix}{name}", {})[envelope.place] = envelope, one
    orphans = []
    for name, places in found.items():
        envelope = next(iter(places.values()))[0]
        if len(places) == envelope.num_prompts:
            request_id = name.removeprefix(f"{envelope.owner}:") if envelope.owner else name
            orphans.append(Orphan(envelope, request_id, [places[place][1] for place in sorted(places)]))
    return orphans


def _as_accepted(asked: Asked, request_id: str, envelope: Envelope) -> Asked:
    """A call that came again, with the id, the time and the model's name that it had first."""
    asked.prompts.clear()
    return msgspec.structs.replace(asked, request_id=request_id, envelope=envelope)


def _other_body(key: Key) -> ApiError:
    text = f"another body came with this {key[1]} before; send each of your own, or the same body again"
    return ApiError(422, text, key[1], "key_reused", {"x-should-retry": "false"})


def _in_use(key: Key) -> ApiError:
    if key[1] == ITS_ID:
        text = f"a request with the id {key[2]!r} is running; ids must differ"
        return ApiError(409, text, "request_id", "request_id_in_use", {"x-should-retry": "false"})
    text = "a call with this Idempotency-Key is being answered on another connection"
    return ApiError(409, text, key[1], "key_in_use", {"x-should-retry": "false"})

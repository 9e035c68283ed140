"""Calls that go on when their client leaves, and those of the process before: who may have their answers.

A call with a key (the header Idempotency-Key, or a request id of its caller's own) is kept for a time. The
same key with the same body has its answer from the beginning; so has, once, a client that tries again what
the process before had accepted. A response that is stored goes on, too, and its answer into the store.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from mmengine.errors import KeepFailed, MMEngineError
from mmengine.serve.async_engine import AsyncEngine
from mmengine.serve.operators import operator_log
from mmengine.serve.record import News, Reader, Record
from mmengine.serve.stream import Stream
from mmengine.server.asked import Asked, Envelope
from mmengine.server.asking import ask
from mmengine.server.callers import ITS_ID, Caller, Key
from mmengine.server.errors import ApiError
from mmengine.server.orphans import Orphan, asked_before, orphans_of
from mmengine.server.responses.kept import KeptResponses

MAX_KEPT_OUTPUTS = 2**18  # of answers that nobody reads any more; the oldest go
STORE_AGAIN_S = 1.0  # behind which a store that failed is tried again
RESPONSE = "response"  # the kind of key that a stored response has
_OUTPUTS_OF_A_CALL = 16  # as many as a call takes beside them


class Call:
    """One that goes on when its client leaves. `is_stored`: its answer goes into the store when it is
    whole."""

    def __init__(
        self, asked: Asked, streams: Sequence[Stream], calls: "Calls", keys: list[Key], is_stored: bool
    ):
        self.asked, self.keys, self._calls, self.is_stored = asked, keys, calls, is_stored
        self._streams = streams
        self.records = [Record(stream) for stream in streams]
        self._num_readers = 0
        self.timer: asyncio.TimerHandle | None = None
        self.storing: asyncio.Task[None] | None = None
        for record in self.records:
            record.begin(self._ended)

    @property
    def stays(self) -> bool:
        """Whether it is finished though nobody asks for it."""
        responses = self.asked.envelope.responses
        return self.is_stored and responses is not None and responses.background

    @property
    def is_live(self) -> bool:
        """Whether a client listens."""
        return bool(self._num_readers)

    @property
    def is_over(self) -> bool:
        return all(record.is_over for record in self.records)

    @property
    def num_outputs(self) -> int:
        return sum(len(record.items) for record in self.records)

    @property
    def is_accepted(self) -> bool:
        return all(stream.is_accepted for stream in self._streams)

    @property
    def is_good(self) -> bool:
        """Whether it was accepted, and did not fail."""
        return self.is_accepted and not any(record.error for record in self.records)

    def readers(self) -> list[News]:
        if self.timer is not None:
            self.timer.cancel()
        self._num_readers += len(self.records)
        return [Reader(record, self._left) for record in self.records]

    def _left(self) -> None:
        self._num_readers -= 1
        if not self._num_readers:
            self._calls.unattended(self)

    def _ended(self) -> None:
        if self.is_over:
            self._calls.over(self)

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def delivered(self) -> None:
        """Its answer is where it will not be lost, or needed by nobody."""
        for stream in self._streams:
            stream.delivered()


class Calls:
    """`reattach_s`: for which a call is kept that nobody listens to, and for which those of the process
    before are. `kept`: where responses are stored, if they are. Belongs to the event loop on which it is
    made."""

    def __init__(self, engine: AsyncEngine, reattach_s: float, kept: KeptResponses | None = None):
        self._engine, self._reattach_s, self._kept_responses = engine, reattach_s, kept
        self._calls: dict[Key, Call] = {}
        self._unread: dict[Call, int] = {}  # outputs of those that nobody listens to, the oldest first
        self._num_unread = 0  # outputs
        self._refusing: set[asyncio.Task[None]] = set()  # so that nobody collects them
        self._orphans: list[Orphan] = []
        for orphan in orphans_of(engine.left()):
            if self._stores(orphan.envelope):
                self._take_up(orphan)
            else:
                self._orphans.append(orphan)
        if engine.left():
            asyncio.get_running_loop().call_later(reattach_s, self._forget_orphans)

    async def sources(self, asked: Asked, caller: Caller) -> tuple[Asked, Sequence[News]]:
        """Where the answers to a call come from, and the call as it was accepted first. Raises ApiError where
        its key is taken, and InvalidRequest, QueueFull, KeepFailed."""
        keys = caller.keys(asked.envelope.owner, asked.request_id)
        if (again := self._again(asked, keys, caller)) is not None:
            return again
        if not self._stores(asked.envelope):
            streams = ask(self._engine, asked, hold=bool(keys))
            return asked, self._keep(asked, streams, keys, False).readers() if keys else streams
        assert self._kept_responses is not None
        envelope = await self._kept_responses.begin(asked.envelope, asked.request_id, asked.media)
        if (again := self._again(asked, keys, caller)) is not None:  # it came twice at once
            return again
        asked = msgspec.structs.replace(asked, envelope=envelope)
        try:
            streams = ask(self._engine, asked, hold=True)
        except MMEngineError:
            self._refused(asked)
            raise
        return asked, self._keep(asked, streams, keys, True).readers()

    def _again(self, asked: Asked, keys: list[Key], caller: Caller) -> tuple[Asked, Sequence[News]] | None:
        """Those of a call that was accepted before."""
        for key in keys:
            if (call := self._calls.get(key)) is not None:
                if call.is_live:
                    raise in_use(key)
                if call.asked.envelope.digest != asked.envelope.digest:
                    raise other_body(key)
                self._num_unread -= self._unread.pop(call, 0)
                return _as_accepted(asked, call.asked.request_id, call.asked.envelope), call.readers()
        orphan = next((one for one in self._orphans if one.is_of(asked.envelope, keys, caller)), None)
        if orphan is None:
            return None
        if orphan.envelope.digest != asked.envelope.digest:
            raise other_body(keys[0])
        self._orphans.remove(orphan)
        asked = _as_accepted(asked, orphan.request_id, orphan.envelope)
        streams = [self._engine.attach(one.request_id, hold=bool(keys)) for one in orphan.left]
        return asked, self._keep(asked, streams, keys, False).readers() if keys else streams

    def response(self, owner: str, request_id: str) -> Call | None:
        """One that is stored, and not in the store yet."""
        return self._calls.get((owner, RESPONSE, request_id))

    def kept(self) -> list[Call]:
        """Those that go on without their client, or would, in the order in which they came."""
        return list(dict.fromkeys(self._calls.values()))

    def _stores(self, envelope: Envelope) -> bool:
        return (
            self._kept_responses is not None and envelope.responses is not None and envelope.responses.store
        )

    def _keep(self, asked: Asked, streams: Sequence[Stream], keys: list[Key], is_stored: bool) -> Call:
        if is_stored:
            keys = [*keys, (asked.envelope.owner, RESPONSE, asked.request_id)]
        call = Call(asked, streams, self, keys, is_stored)
        self._calls.update(dict.fromkeys(keys, call))
        return call

    def _take_up(self, orphan: Orphan) -> None:
        """A response that the process before was to store."""
        streams = [self._engine.attach(one.request_id, hold=True) for one in orphan.left]
        asked = asked_before(orphan.request_id, orphan.envelope, streams[0].sampling)
        keys = orphan.keys()
        self.unattended(self._keep(asked, streams, keys, True))

    def unattended(self, call: Call) -> None:
        """Its client left, with or without its answer."""
        if not call.is_good or not self._reattach_s:
            self._expire(call)
            return
        call.timer = asyncio.get_running_loop().call_later(self._reattach_s, self._expire, call)
        self._unread[call] = call.num_outputs + _OUTPUTS_OF_A_CALL
        self._num_unread += self._unread[call]
        while self._num_unread > MAX_KEPT_OUTPUTS:
            self._expire(next(iter(self._unread)))

    def _expire(self, call: Call) -> None:
        """Nobody came again for it."""
        self._num_unread -= self._unread.pop(call, 0)
        if call.is_stored and call.is_good:
            if not call.is_over and not call.stays:
                call.cancel()
            for key in call.keys:
                if key[1] != RESPONSE:
                    self._calls.pop(key, None)
            call.keys = [key for key in call.keys if key[1] == RESPONSE]
            return  # it is stored when it is over
        call.cancel()
        if call.is_stored and not call.is_accepted:
            self._refused(call.asked)
        self._forget(call)

    def _refused(self, asked: Asked) -> None:
        """A response that was not accepted after all."""
        assert self._kept_responses is not None
        task = asyncio.get_running_loop().create_task(
            self._kept_responses.refused(asked.envelope, asked.request_id)
        )
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)

    def _forget(self, call: Call) -> None:
        call.delivered()
        for key in call.keys:
            self._calls.pop(key, None)

    def over(self, call: Call) -> None:
        """All of its answer has come."""
        if call.is_stored and call.is_good:
            call.storing = asyncio.get_running_loop().create_task(self._store(call))

    async def _store(self, call: Call) -> None:
        assert self._kept_responses is not None
        asked = call.asked
        while True:
            try:
                await self._kept_responses.put(asked.envelope, asked.request_id, call.records[0].whole())
                break
            except KeepFailed as error:
                operator_log.error("response not stored", id=asked.request_id, reason=str(error))
                await asyncio.sleep(STORE_AGAIN_S)
        call.delivered()
        self._calls.pop((asked.envelope.owner, RESPONSE, asked.request_id), None)
        call.keys = [key for key in call.keys if key[1] != RESPONSE]

    async def drop(self, call: Call) -> None:
        """It is deleted before it is in the store."""
        call.is_stored = False
        call.cancel()
        if call.storing is not None:
            call.storing.cancel()
            await asyncio.wait([call.storing])
        self._forget(call)

    def _forget_orphans(self) -> None:
        orphans, self._orphans = self._orphans, []
        for one in self._engine.left():
            self._engine.give_up(one.request_id)
        if orphans:
            operator_log.info("nobody asked for calls of the process before", calls=len(orphans))


def _as_accepted(asked: Asked, request_id: str, envelope: Envelope) -> Asked:
    """A call that came again, with the id, the time and the model's name that it had first."""
    asked.prompts.clear()
    return msgspec.structs.replace(asked, request_id=request_id, envelope=envelope)


def other_body(key: Key) -> ApiError:
    """The same key came with another body."""
    text = f"another body came with this {key[1]} before; send each of your own, or the same body again"
    return ApiError(422, text, key[1], "key_reused", {"x-should-retry": "false"})


def in_use(key: Key) -> ApiError:
    """A call with this key is still being answered."""
    if key[1] == ITS_ID:
        text = f"a request with the id {key[2]!r} is running; ids must differ"
        return ApiError(409, text, "request_id", "request_id_in_use", {"x-should-retry": "false"})
    text = "a call with this Idempotency-Key is being answered on another connection"
    return ApiError(409, text, key[1], "key_in_use", {"x-should-retry": "false"})

"""Calls that go on when their client leaves, and those of the process before: who may have their answers.

A call with a key (the header Idempotency-Key, or a request id of its caller's own) is kept for a time. The
same key with the same body has its answer from the beginning; so has, once, a client that tries again what
the process before had accepted. A response that is stored goes on, too, and its answer into the store.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from mmengine.errors import ErrorCode, FieldPath, MMEngineError
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.stream.answer_record import AnswerRecord, AnswerSource, RecordReader
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.calls.answer_writer import Storing
from mmengine.server.calls.call_identity import ITS_ID, Caller, Key, keys_of
from mmengine.server.calls.detached_call import RESPONSE, Call
from mmengine.server.calls.recovered_calls import Orphan, asked_before, orphans_of
from mmengine.server.calls.stored_responses import KeptResponses
from mmengine.server.chat.parsed_request import Asked, Envelope
from mmengine.server.chat.submission import ask
from mmengine.server.http.errors import ApiError

MAX_KEPT_OUTPUTS = 2**18  # of answers that nobody reads any more; the oldest go
_LOOK_AGAIN_S = 1.0  # whether what runs in the background is over
_Fill = Callable[[Asked], Awaitable[None]]


class Calls:
    """`reattach_s`: for which a call is kept that nobody listens to, and for which those of the process
    before are. `kept`: where responses are stored, if they are. Belongs to the event loop on which it is
    made."""

    def __init__(self, engine: ServedEngine, reattach_s: float, kept: KeptResponses | None = None):
        self._engine, self._reattach_s, self._kept_responses = engine, reattach_s, kept
        self._calls: dict[Key, Call] = {}
        self._unread: dict[Call, int] = {}  # sizes of those that nobody listens to, the oldest first
        self._num_unread = 0  # all of it
        self._beginning: set[tuple[str, str]] = set()  # responses of which the store hears before the log
        self._background: set[asyncio.Task[None]] = set()  # so that nobody collects them
        self._orphans: list[Orphan] = []
        self._taken_up: list[tuple[Orphan, Call]] = []  # orphans that go into the store, whoever asks
        self._storing = Storing(kept, self._stored) if kept is not None else None
        left = engine.recovered_requests()
        if kept is not None and kept.begun_before:
            self._aside(partial(kept.drop_unasked, {one.request_id for one in left}))
        for orphan in orphans_of(left):
            if self._stores(orphan.envelope):
                self._take_up(orphan)
            else:
                self._orphans.append(orphan)
        if left:
            asyncio.get_running_loop().call_later(reattach_s, self._forget_orphans)

    async def sources(
        self, asked: Asked, caller: Caller, fill: _Fill
    ) -> tuple[Asked, Sequence[AnswerSource]]:
        """Where the answers to a call come from, and the call as it was accepted first. `fill`: gives its
        prompts what they lack, unless there is an answer that needs none of it. Raises ApiError where its key
        is taken, what `fill` does, and InvalidRequest, QueueFull, KeepFailed."""
        keys = keys_of(asked.envelope, asked.request_id, names_itself=caller.names_itself)
        if (again := self._again(asked, keys, caller)) is not None:
            return again
        if not self._stores(asked.envelope):
            if asked.uploads:
                await fill(asked)
                if (again := self._again(asked, keys, caller)) is not None:  # the same key came meanwhile
                    return again
            streams = ask(self._engine, asked, hold=bool(keys))
            return asked, self._keep(asked, streams, keys, False).readers() if keys else streams
        assert self._kept_responses is not None and self._storing is not None
        self._storing.check_room()
        if not (keys or asked.uploads) and self._kept_responses.fits_log(asked.envelope, asked.media):
            return asked, self._keep(asked, ask(self._engine, asked, hold=True), keys, True).readers()
        name = asked.envelope.owner, asked.request_id
        if name in self._beginning:  # it came twice at once
            raise in_use((asked.envelope.owner, ITS_ID, asked.request_id))
        self._beginning.add(name)
        try:
            return await self._stored_sources(asked, caller, keys, self._kept_responses, fill)
        finally:
            self._beginning.discard(name)

    async def _stored_sources(
        self, asked: Asked, caller: Caller, keys: list[Key], kept: KeptResponses, fill: _Fill
    ) -> tuple[Asked, Sequence[AnswerSource]]:
        for key in keys:
            before = await kept.of(key)
            if before is not None and before.answer is not None:
                _check_same(key, before.envelope, asked.envelope)
                found = RecordReader(AnswerRecord(before.answer))
                return _as_accepted(asked, before.request_id, before.envelope), [found]
        await fill(asked)
        envelope = await kept.begin(asked.envelope, asked.request_id, asked.media)
        try:
            if (again := self._again(asked, keys, caller)) is not None:  # the same key came twice at once
                self._refused(asked.envelope, asked.request_id)
                return again
            asked = msgspec.structs.replace(asked, envelope=envelope)
            streams = ask(self._engine, asked, hold=True)
        except (MMEngineError, ApiError):
            self._refused(asked.envelope, asked.request_id)
            raise
        return asked, self._keep(asked, streams, keys, True).readers()

    def _again(
        self, asked: Asked, keys: list[Key], caller: Caller
    ) -> tuple[Asked, Sequence[AnswerSource]] | None:
        """Those of a call that was accepted before."""
        for key in keys:
            if (call := self._calls.get(key)) is not None:
                if call.is_live:
                    raise in_use(key)
                _check_same(key, call.envelope, asked.envelope)
                return _as_accepted(asked, call.request_id, call.envelope), call.readers()
        if not (self._orphans or self._taken_up):
            return None
        orphan = next((one for one in self._orphans if one.is_of(asked.envelope, keys, caller)), None)
        if orphan is None:
            return self._tried_again(asked, keys, caller)
        if orphan.envelope.digest != asked.envelope.digest:
            raise other_body(keys[0])
        self._orphans.remove(orphan)
        asked = msgspec.structs.replace(asked, request_id=orphan.request_id, envelope=orphan.envelope)
        streams = ask(self._engine, asked, hold=bool(keys), left=orphan.left)
        return asked, self._keep(asked, streams, keys, False).readers() if keys else streams

    def _tried_again(
        self, asked: Asked, keys: list[Key], caller: Caller
    ) -> tuple[Asked, Sequence[AnswerSource]] | None:
        """Those of a response of the process before, of which its client did not hear; once."""
        for orphan, call in self._taken_up if caller.tries_again else ():
            if call.keys and not call.is_live and orphan.is_of(asked.envelope, keys, caller):
                self._taken_up.remove((orphan, call))
                return _as_accepted(asked, orphan.request_id, call.envelope), call.readers()
        return None

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
        call = Call(asked, streams, self, keys, is_stored)
        for key in keys:
            self._calls[key] = call
        if is_stored:
            self._calls[call.name] = call
        return call

    def _take_up(self, orphan: Orphan) -> None:
        """A response that the process before was to store."""
        streams = [self._engine.attach(one.request_id, hold=True) for one in orphan.left.values()]
        asked = asked_before(orphan.request_id, orphan.envelope, streams[0].sampling)
        call = self._keep(asked, streams, orphan.keys(), True)
        self._taken_up.append((orphan, call))
        call.go_on()
        self.unattended(call)

    def unattended(self, call: Call) -> None:
        """Its client left, with or without its answer."""
        if not call.keys and (call.is_answered or (call.is_over and call.is_good)):
            return  # nobody asks for it before it is stored
        if not call.is_good or not self._reattach_s:
            self._expire(call)
            return
        call.timer = asyncio.get_running_loop().call_later(self._reattach_s, self._expire, call)
        self._unread[call] = call.size
        self._num_unread += self._unread[call]
        while self._num_unread > MAX_KEPT_OUTPUTS:
            self._expire(next(iter(self._unread)))

    def _expire(self, call: Call) -> None:
        """Nobody came again for it."""
        self.attended(call)
        if self._reattach_s and call.stays and call.is_good and not call.is_over:
            later = max(self._reattach_s, _LOOK_AGAIN_S)
            call.timer = asyncio.get_running_loop().call_later(later, self._expire, call)
            return
        for key in call.keys:
            self._calls.pop(key, None)
        call.keys = []
        if call.is_stored and call.is_good:
            if not call.is_over and not call.stays:
                call.cancel()
            return  # it is stored when it is over
        call.cancel()
        self._forget(call)
        if call.is_stored and call.is_refused:
            self._refused(call.envelope, call.request_id)

    def attended(self, call: Call) -> None:
        """It waits for no client any more."""
        self._num_unread -= self._unread.pop(call, 0)
        if call.timer is not None:
            call.timer.cancel()

    def _refused(self, envelope: Envelope, request_id: str) -> None:
        """A response that was not accepted after all: nothing of it stays in the store."""
        assert self._kept_responses is not None
        if self.response(envelope.owner, request_id) is None:
            self._aside(partial(self._kept_responses.refused, envelope, request_id))

    def _aside(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(_unless_it_fails(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _forget(self, call: Call) -> None:
        self._engine.release_answers(call.release())
        for key in (*call.keys, call.name):
            if self._calls.get(key) is call:
                del self._calls[key]

    def over(self, call: Call) -> None:
        """All of its answer has come."""
        if not call.is_answered:
            if not call.is_live:
                self._expire(call)
        elif call.is_stored and self._storing is not None:
            call.settle()
            self._storing.put(call)

    def _stored(self, calls: list[Call]) -> None:
        for call in calls:
            self._calls.pop(call.name, None)
            if not call.keys and call.timer is not None:
                self.attended(call)
        self._engine.release_answers([held for call in calls for held in call.release()])

    async def flush(self) -> None:
        """Store now what has ended, unless the store fails."""
        if self._storing is not None:
            await self._storing.flush()

    async def settled(self) -> None:
        """Wait until no process that goes on with the log would take up what was stored or deleted."""
        await self._engine.settled()

    async def drop(self, call: Call) -> None:
        """A response is deleted before it is in the store."""
        assert self._storing is not None
        call.is_stored = False
        call.cancel()
        await call.record().over()
        await self._storing.drop(call)
        self.attended(call)
        self._forget(call)

    def _forget_orphans(self) -> None:
        orphans, self._orphans, self._taken_up = self._orphans, [], []
        for one in self._engine.recovered_requests():
            self._engine.give_up(one.request_id)
        if orphans:
            operator_log.info("nobody asked for calls of the process before", calls=len(orphans))


async def _unless_it_fails(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except MMEngineError as error:  # a later process tries again
        operator_log.warning("the store keeps what belongs to no response", reason=str(error))


def _as_accepted(asked: Asked, request_id: str, envelope: Envelope) -> Asked:
    """A call that came again, with the id, the time and the model's name that it had first."""
    asked.prompts.clear()
    return msgspec.structs.replace(asked, request_id=request_id, envelope=envelope)


def _check_same(key: Key, mine: Envelope, theirs: Envelope) -> None:
    """Raises ApiError where this key came with another call before."""
    if mine.digest != theirs.digest or (key[1] == ITS_ID and theirs.key not in ("", mine.key)):
        raise other_body(key)


def other_body(key: Key) -> ApiError:
    """The same key came with another body."""
    what = "another body, or another Idempotency-Key," if key[1] == ITS_ID else "another body"
    text = f"{what} came with this {key[1]} before; send each of your own, or the same call again"
    return ApiError(ErrorCode.KEY_REUSED, text, key[1])


def in_use(key: Key) -> ApiError:
    """A call with this key is still being answered."""
    if key[1] == ITS_ID:
        text = f"a request with the id {key[2]!r} is running; ids must differ"
        return ApiError(ErrorCode.REQUEST_ID_IN_USE, text, FieldPath("request_id"))
    text = "a call with this Idempotency-Key is being answered on another connection"
    return ApiError(ErrorCode.KEY_IN_USE, text, key[1])

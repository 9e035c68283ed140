"""Holds the calls that continue after their client disconnects, and gives their answers to retries.

A key is the header Idempotency-Key, or a request id that the client chose. A call with a key stays
in the registry for a limited time. A later call with the same key and body gets the whole answer, beginning
with the first token. A recovered call is a call that the previous process did not finish. A recovered call
without a key may give its answer to the first retry with the same body. Calls whose response is stored also
continue without a client.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from mmengine.errors import MMEngineError
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.stream.answer_record import AnswerRecord, AnswerSource, RecordReader
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.calls.answer_writer import AnswerWriter, log_store_errors
from mmengine.server.calls.call_identity import (
    ITS_ID,
    Caller,
    Key,
    check_same,
    key_in_use,
    key_reused,
    keys_of,
    with_first_identity,
)
from mmengine.server.calls.detached_call import RESPONSE, DetachedCall
from mmengine.server.calls.recovered_calls import RecoveredCall, group_recovered_calls, rebuild_request
from mmengine.server.calls.stored_responses import StoredResponses
from mmengine.server.chat.parsed_request import Envelope, ParsedRequest
from mmengine.server.chat.submission import submit
from mmengine.server.http.errors import ApiError

# Maximum size of all calls without a reader, in output tokens (see `DetachedCall.size`). The oldest calls are
# dropped first.
MAX_KEPT_OUTPUTS = 2**18
_LOOK_AGAIN_S = 1.0  # Seconds between two checks of a background call.
_Fill = Callable[[ParsedRequest], Awaitable[ParsedRequest]]


class CallRegistry:
    """All calls that can continue after their client disconnects.

    `reattach_s`: seconds that a call without a reader, or a recovered call, waits for its client.
    `stored_responses`: the store for responses, or None. A registry belongs to the event loop
    that creates it.
    """

    def __init__(
        self, engine: ServedEngine, reattach_s: float, stored_responses: StoredResponses | None = None
    ):
        self._engine, self._reattach_s, self._kept_responses = engine, reattach_s, stored_responses
        self._calls: dict[Key, DetachedCall] = {}
        self._unread: dict[DetachedCall, int] = {}  # Sizes of calls without a reader, oldest first.
        self._num_unread = 0  # The sum of the sizes in `_unread`.
        # (owner, id) of responses whose input is being written to the store. Their requests are not in the
        # log yet.
        self._beginning: set[tuple[str, str]] = set()
        # References to background tasks, which protect the tasks from garbage collection.
        self._background: set[asyncio.Task[None]] = set()
        self._recovered: list[RecoveredCall] = []
        # Recovered calls whose answers are written to the store even if no client returns.
        self._continued: list[tuple[RecoveredCall, DetachedCall]] = []
        self._storing = AnswerWriter(stored_responses, self._stored) if stored_responses is not None else None
        left = engine.recovered_requests()
        if stored_responses is not None and stored_responses.begun_before:
            self._aside(partial(stored_responses.drop_unlogged, {one.request_id for one in left}))
        for recovered_call in group_recovered_calls(left):
            if self._stores(recovered_call.envelope):
                self._continue(recovered_call)
            else:
                self._recovered.append(recovered_call)
        if left:
            asyncio.get_running_loop().call_later(reattach_s, self._drop_unclaimed)

    async def sources(
        self, request: ParsedRequest, caller: Caller, fill: _Fill
    ) -> tuple[ParsedRequest, Sequence[AnswerSource]]:
        """Return the request and an answer source for each prompt. If the call repeats an earlier call, the
        request has the earlier call's id and envelope.

        `fill` reads media into the prompts. `fill` is not called if an earlier answer is found. Raises
        ApiError if the key is in use. Also raises InvalidRequest, QueueFull, KeepFailed, and `fill`'s errors.
        """
        keys = keys_of(request.envelope, request.request_id, names_itself=caller.names_itself)
        if (again := self._repeated(request, keys, caller)) is not None:
            return again
        if not self._stores(request.envelope):
            if request.needs_media:
                request = await fill(request)
                if (again := self._repeated(request, keys, caller)) is not None:
                    return again
            streams = submit(self._engine, request, hold=bool(keys))
            return request, self._keep(request, streams, keys, False).readers() if keys else streams
        assert self._kept_responses is not None and self._storing is not None
        self._storing.check_room()
        if not (keys or request.needs_media) and self._kept_responses.fits_log(
            request.envelope, request.media
        ):
            return request, self._keep(
                request, submit(self._engine, request, hold=True), keys, True
            ).readers()
        name = request.envelope.owner, request.request_id
        if name in self._beginning:  # Two calls with the same id arrived at the same time.
            raise key_in_use((request.envelope.owner, ITS_ID, request.request_id))
        self._beginning.add(name)
        try:
            return await self._stored_sources(request, caller, keys, self._kept_responses, fill)
        finally:
            self._beginning.discard(name)

    async def _stored_sources(
        self,
        request: ParsedRequest,
        caller: Caller,
        keys: list[Key],
        stored_responses: StoredResponses,
        fill: _Fill,
    ) -> tuple[ParsedRequest, Sequence[AnswerSource]]:
        for key in keys:
            before = await stored_responses.of(key)
            if before is not None and before.answer is not None:
                check_same(key, before.envelope, request.envelope)
                found = RecordReader(AnswerRecord(before.answer))
                return with_first_identity(request, before.request_id, before.envelope), [found]
        request = await fill(request)
        envelope = await stored_responses.begin(request.envelope, request.request_id, request.media)
        try:
            if (again := self._repeated(request, keys, caller)) is not None:
                self._refused(request.envelope, request.request_id)
                return again
            request = msgspec.structs.replace(request, envelope=envelope)
            streams = submit(self._engine, request, hold=True)
        except (MMEngineError, ApiError):
            self._refused(request.envelope, request.request_id)
            raise
        return request, self._keep(request, streams, keys, True).readers()

    def _repeated(
        self, request: ParsedRequest, keys: list[Key], caller: Caller
    ) -> tuple[ParsedRequest, Sequence[AnswerSource]] | None:
        """Find the earlier call that this call repeats. Return the request and the earlier call's answer
        sources, or None.
        """
        for key in keys:
            if (call := self._calls.get(key)) is not None:
                if call.is_live:
                    raise key_in_use(key)
                check_same(key, call.envelope, request.envelope)
                return with_first_identity(request, call.request_id, call.envelope), call.readers()
        if not (self._recovered or self._continued):
            return None
        recovered_call = next(
            (one for one in self._recovered if one.is_of(request.envelope, keys, caller)), None
        )
        if recovered_call is None:
            return self._retried(request, keys, caller)
        if recovered_call.envelope.digest != request.envelope.digest:
            raise key_reused(keys[0])
        self._recovered.remove(recovered_call)
        request = msgspec.structs.replace(
            request, request_id=recovered_call.request_id, envelope=recovered_call.envelope
        )
        streams = submit(self._engine, request, hold=bool(keys), recovered=recovered_call.left)
        return request, self._keep(request, streams, keys, False).readers() if keys else streams

    def _retried(
        self, request: ParsedRequest, keys: list[Key], caller: Caller
    ) -> tuple[ParsedRequest, Sequence[AnswerSource]] | None:
        """Find the recovered call with a stored response that this call retries. Return the request and the
        recovered call's answer sources, or None. Each recovered call is returned only once.
        """
        for recovered_call, call in self._continued if caller.tries_again else ():
            if call.keys and not call.is_live and recovered_call.is_of(request.envelope, keys, caller):
                self._continued.remove((recovered_call, call))
                return with_first_identity(request, recovered_call.request_id, call.envelope), call.readers()
        return None

    def response(self, owner: str, request_id: str) -> DetachedCall | None:
        """Return the call with this response id. Returns None if the store already has the response, or if no
        call has this id.
        """
        return self._calls.get((owner, RESPONSE, request_id))

    def detached_calls(self) -> list[DetachedCall]:
        """Return the calls that can continue without a client, in arrival order."""
        return list(dict.fromkeys(self._calls.values()))

    def _stores(self, envelope: Envelope) -> bool:
        return (
            self._kept_responses is not None and envelope.responses is not None and envelope.responses.store
        )

    def _keep(
        self, request: ParsedRequest, streams: Sequence[Stream], keys: list[Key], is_stored: bool
    ) -> DetachedCall:
        call = DetachedCall(request, streams, self, keys, is_stored)
        for key in keys:
            self._calls[key] = call
        if is_stored:
            self._calls[call.name] = call
        return call

    def _continue(self, recovered_call: RecoveredCall) -> None:
        """Continue a recovered call whose response is written to the store."""
        streams = [self._engine.attach(one.request_id, hold=True) for one in recovered_call.left.values()]
        request = rebuild_request(recovered_call.request_id, recovered_call.envelope, streams[0].sampling)
        call = self._keep(request, streams, recovered_call.keys(), True)
        self._continued.append((recovered_call, call))
        call.go_on()
        self.unattended(call)

    def unattended(self, call: DetachedCall) -> None:
        """Start the timer that waits for the client's return. Called when the call's last reader has left."""
        if not call.keys and (call.is_answered or (call.is_over and call.is_good)):
            return  # Without a key, clients can ask only for stored answers.
        if not call.is_good or not self._reattach_s:
            self._expire(call)
            return
        call.timer = asyncio.get_running_loop().call_later(self._reattach_s, self._expire, call)
        self._unread[call] = call.size
        self._num_unread += self._unread[call]
        while self._num_unread > MAX_KEPT_OUTPUTS:
            self._expire(next(iter(self._unread)))

    def _expire(self, call: DetachedCall) -> None:
        """Drop a call because its client did not return in time."""
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
            return  # The answer is written to the store when the call ends.
        call.cancel()
        self._forget(call)
        if call.is_stored and call.is_refused:
            self._refused(call.envelope, call.request_id)

    def attended(self, call: DetachedCall) -> None:
        """Stop the timer. Called when a client reads the call again, and when the call is dropped."""
        self._num_unread -= self._unread.pop(call, 0)
        if call.timer is not None:
            call.timer.cancel()

    def _refused(self, envelope: Envelope, request_id: str) -> None:
        """Delete the stored input of a request that the engine refused."""
        assert self._kept_responses is not None
        if self.response(envelope.owner, request_id) is None:
            self._aside(partial(self._kept_responses.delete_refused, envelope, request_id))

    def _aside(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(log_store_errors(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _forget(self, call: DetachedCall) -> None:
        self._engine.release_answers(call.release())
        for key in (*call.keys, call.name):
            if self._calls.get(key) is call:
                del self._calls[key]

    def over(self, call: DetachedCall) -> None:
        """Handle a call's end: the answer is complete or has failed."""
        if not call.is_answered:
            if not call.is_live:
                self._expire(call)
        elif call.is_stored and self._storing is not None:
            call.settle()
            self._storing.put(call)

    def _stored(self, calls: list[DetachedCall]) -> None:
        for call in calls:
            self._calls.pop(call.name, None)
            if not call.keys and call.timer is not None:
                self.attended(call)
        self._engine.release_answers([held for call in calls for held in call.release()])

    async def flush(self) -> None:
        """Write finished answers to the store now. After a failed write, the answers stay in the queue."""
        if self._storing is not None:
            await self._storing.flush()

    async def settled(self) -> None:
        """Wait until the log records which calls are stored or deleted. The next process will not recover
        these calls.
        """
        await self._engine.settled()

    async def drop(self, call: DetachedCall) -> None:
        """Delete a response that the store does not have yet."""
        assert self._storing is not None
        call.is_stored = False
        call.cancel()
        await call.record().wait_over()
        await self._storing.drop(call)
        self.attended(call)
        self._forget(call)

    def _drop_unclaimed(self) -> None:
        recovered, self._recovered, self._continued = self._recovered, [], []
        for one in self._engine.recovered_requests():
            self._engine.give_up(one.request_id)
        if recovered:
            operator_log.info("recovered calls dropped: no client returned for them", calls=len(recovered))

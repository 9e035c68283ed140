"""A replica in a fleet runs requests from ingresses (the processes that clients call) on an AsyncEngine. The
replica streams a request's outputs until the request ends or moves to another replica.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from mmengine.errors import ExecutorFailed, MMEngineError
from mmengine.fleet.wire import (
    Accepted,
    Heartbeat,
    Outputs,
    Redirect,
    Rejection,
    ReplicaMessage,
    ReplicaName,
    ReplicaRequest,
    accepted_message,
    answer_end,
    decode_request,
    encode,
    prompt_from_wire,
    submit_options,
    wire_output,
)
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.reasoning import NO_REASONING

BEAT_S = 1.0  # seconds without output after which the replica sends a heartbeat
HANG_S = 60.0  # seconds after which a step counts as hung and its requests move
VACATE_S = 10.0  # seconds to wait for the end of a cancelled request with the same id


class Load(NamedTuple):
    """A replica's current load. `waiting_tokens`: prompt tokens of requests without output."""

    num_open: int
    waiting_tokens: int
    free_blocks: int


class Replica:
    """Serves requests from ingresses in the process of one replica.

    A restarted replica has a new `name` and a new log. A heartbeat is sent after `beat_s` seconds without
    output. A step that takes longer than `hang_s` seconds counts as hung: its requests move to other
    replicas, and `check` raises. An instance belongs to one event loop.
    """

    def __init__(self, name: str, engine: AsyncEngine, *, beat_s: float = BEAT_S, hang_s: float = HANG_S):
        self.name, self.engine = name, engine
        self._beat_s, self._hang_s = beat_s, hang_s
        self._leaving = ""  # why all requests must move; "" if they may stay
        self._runs: dict[str, _Run] = {}

    async def run(self, data: bytes) -> AsyncIterator[bytes]:
        """Run an encoded ReplicaRequest and yield the messages of its answer. Closing the iterator cancels
        the request. Raises InvalidRequest if `data` cannot be decoded.
        """
        request = decode_request(data)
        yield encode(ReplicaName(self.name))
        if self.name in request.avoid or self._leaving:
            yield encode(Redirect(self._leaving or "the ingress avoids this replica"))
            return
        if request.is_count:
            yield encode(await self._counted(request))
            return
        await self._vacate(request)
        try:
            stream = self.engine.stream(
                prompt_from_wire(request.prompt), request.sampling, **submit_options(request)
            )
        except MMEngineError as error:
            yield encode(_refusal(error))
            return
        run = _Run(stream, request.route, len(request.outputs) // 4)
        self._runs[request.request_id] = run
        try:
            async for message in self._messages(run):
                yield encode(message)
        finally:
            run.stream.cancel()
            run.is_left = True
            if run.stream.is_over:
                self._forget(request.request_id, run)
            else:  # the engine keeps a cancelled request and its id until a step's end
                run.stream.listen(partial(self._take_rest, request.request_id, run))
                self._take_rest(request.request_id, run)

    async def _counted(self, request: ReplicaRequest) -> ReplicaMessage:
        try:
            return Accepted(NO_REASONING, None, {}, await self.engine.count(prompt_from_wire(request.prompt)))
        except MMEngineError as error:
            return _refusal(error)

    def _take_rest(self, request_id: str, run: "_Run") -> None:
        """Discard the last outputs of a request that no ingress reads any more."""
        with suppress(MMEngineError):
            while run.stream.backlog:
                run.stream.take()
        if run.stream.is_over:
            self._forget(request_id, run)

    def _forget(self, request_id: str, run: "_Run") -> None:
        run.stream.listen(None)
        run.gone.set()
        if self._runs.get(request_id) is run:
            del self._runs[request_id]

    async def _vacate(self, request: ReplicaRequest) -> None:
        """Wait for the end of the request's earlier attempt. The ingress has cancelled the earlier attempt,
        but the engine may still run the attempt.
        """
        before = self._runs.get(request.request_id)
        if before is None or before.route != request.route:
            return
        before.stream.cancel()
        before.leave("the ingress sent the request again")
        with suppress(TimeoutError):
            async with asyncio.timeout(VACATE_S):
                await before.gone.wait()

    async def _messages(self, run: "_Run") -> AsyncIterator[ReplicaMessage]:
        stream = run.stream
        run.listen()
        accepted = asyncio.ensure_future(stream.accepted())
        try:
            while not accepted.done():
                if (moved := self._moved(run)) is not None:
                    yield moved
                    return
                done, _ = await asyncio.wait((accepted,), timeout=self._beat_s)
                if not done:
                    yield Heartbeat()
            accepted.result()  # raises the error if the request was refused
            yield accepted_message(stream.accepted_request)
            while not stream.is_over:
                if (moved := self._moved(run)) is not None:
                    yield moved
                    return
                found = stream.take()
                run.num_outputs += sum(len(each.token_ids) for each in found)
                if found or stream.is_over:
                    yield Outputs([wire_output(each) for each in found], answer_end(stream))
                elif not await run.wait(self._beat_s):
                    yield Heartbeat()
        except MMEngineError as error:
            yield _refusal(error)
        finally:
            accepted.cancel()

    def _moved(self, run: "_Run") -> Redirect | None:
        """Return a Redirect if the request must continue on another replica, else None."""
        reason = self._leaving or run.reason or self._hang()
        return Redirect(reason) if reason else None

    def _hang(self) -> str:
        step_s = self.engine.step_clock.seconds
        return f"a step has not returned for {step_s:.0f} seconds" if step_s > self._hang_s else ""

    def leave(self, reason: str) -> None:
        """Refuse new requests, and redirect the running requests immediately."""
        self._leaving = reason
        for run in self._runs.values():
            run.leave(reason)

    def check(self) -> None:
        """Raise ExecutorFailed if only a new process would help: a step hangs, or the engine has stopped.

        Other causes of "not ready", such as a full disk, raise nothing.
        """
        if (reason := self._hang()) or (reason := self._stopped()):
            raise ExecutorFailed(reason)

    def _stopped(self) -> str:
        readiness = self.engine.readiness()
        return readiness.reasons[0] if readiness.is_over else ""

    def load(self) -> Load:
        stats = self.engine.stats()
        runs = [run for run in self._runs.values() if not run.is_left]
        waiting = sum(run.num_waiting_tokens for run in runs)
        return Load(len(runs), waiting, stats.kv_blocks_total - stats.kv_blocks_used)


class _Run:
    """A request whose outputs an ingress reads. `num_outputs`: number of tokens in the answer so far."""

    def __init__(self, stream: Stream, route: str, num_outputs: int):
        self.stream, self.route, self.num_outputs = stream, route, num_outputs
        self.reason = ""  # why the request must move
        self.is_left = False  # whether the ingress has stopped reading
        self.gone = asyncio.Event()  # set when the engine no longer has the request
        self._come = asyncio.Event()

    def listen(self) -> None:
        self.stream.listen(self._come.set)

    def leave(self, reason: str) -> None:
        self.reason = reason
        self._come.set()

    async def wait(self, limit_s: float) -> bool:
        """Return True when outputs came or the request must move, and False after `limit_s` seconds."""
        self._come.clear()
        if self.stream.backlog or self.reason:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await self._come.wait()
        return False

    @property
    def num_waiting_tokens(self) -> int:
        return 0 if self.num_outputs else self.stream.num_prompt_tokens


def _refusal(error: MMEngineError) -> Rejection | Redirect:
    """Return a Redirect if the engine has stopped, else a Rejection."""
    if isinstance(error, ExecutorFailed):
        return Redirect(str(error))
    return Rejection.by(error)

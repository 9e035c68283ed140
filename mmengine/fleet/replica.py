"""A replica's side: requests of an ingress on an AsyncEngine, told of until they are over or have to move."""

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

BEAT_S = 1.0  # of silence, after which an ingress hears that its request is still there
HANG_S = 60.0  # that a step may take before requests go elsewhere
VACATE_S = 10.0  # that a request of the same id is waited for, which its ingress gave up


class Load(NamedTuple):
    """Of a replica now. `waiting_tokens`: of prompts of which no token has been answered yet."""

    num_open: int
    waiting_tokens: int
    free_blocks: int


class Replica:
    """`name`: of this life; another one has another name, and another log. `beat_s`: between signs of life.
    `hang_s`: a step that takes longer hangs: its requests go elsewhere, and `check` raises. Belongs to an
    event loop."""

    def __init__(self, name: str, engine: AsyncEngine, *, beat_s: float = BEAT_S, hang_s: float = HANG_S):
        self.name, self.engine = name, engine
        self._beat_s, self._hang_s = beat_s, hang_s
        self._leaving = ""  # why all requests are to move
        self._runs: dict[str, _Run] = {}

    async def run(self, data: bytes) -> AsyncIterator[bytes]:
        """Answers an Ask; leaving the iteration cancels the request. Raises InvalidRequest for what is no
        Ask."""
        ask = decode_request(data)
        yield encode(ReplicaName(self.name))
        if self.name in ask.avoid or self._leaving:
            yield encode(Redirect(self._leaving or "it is not wanted here"))
            return
        if ask.is_count:
            yield encode(await self._counted(ask))
            return
        await self._vacate(ask)
        try:
            stream = self.engine.stream(prompt_from_wire(ask.prompt), ask.sampling, **submit_options(ask))
        except MMEngineError as error:
            yield encode(_refusal(error))
            return
        run = _Run(stream, ask.journey, len(ask.outputs) // 4)
        self._runs[ask.request_id] = run
        try:
            async for told in self._tell(run):
                yield encode(told)
        finally:
            run.stream.cancel()
            run.is_told = True
            if run.stream.is_over:
                self._forget(ask.request_id, run)
            else:  # the engine has it until a step ends it, and its id
                run.stream.listen(partial(self._take_rest, ask.request_id, run))
                self._take_rest(ask.request_id, run)

    async def _counted(self, ask: ReplicaRequest) -> ReplicaMessage:
        try:
            return Accepted(NO_REASONING, None, {}, await self.engine.count(prompt_from_wire(ask.prompt)))
        except MMEngineError as error:
            return _refusal(error)

    def _take_rest(self, request_id: str, run: "_Run") -> None:
        """The last news of a request that nobody is told of."""
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

    async def _vacate(self, ask: ReplicaRequest) -> None:
        """A request that comes again was given up by its ingress, which may not have come through yet."""
        before = self._runs.get(ask.request_id)
        if before is None or before.journey != ask.journey:
            return
        before.stream.cancel()
        before.leave("its ingress asked again")
        with suppress(TimeoutError):
            async with asyncio.timeout(VACATE_S):
                await before.gone.wait()

    async def _tell(self, run: "_Run") -> AsyncIterator[ReplicaMessage]:
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
            accepted.result()  # raises why it was refused
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
        """Why a request is to go on elsewhere, if it is."""
        why = self._leaving or run.why or self._hang()
        return Redirect(why) if why else None

    def _hang(self) -> str:
        step_s = self.engine.step_clock.seconds
        return f"a step has not returned for {step_s:.0f} seconds" if step_s > self._hang_s else ""

    def leave(self, why: str) -> None:
        """Take no more requests, and send those that are here elsewhere, at once."""
        self._leaving = why
        for run in self._runs.values():
            run.leave(why)

    def check(self) -> None:
        """Raises ExecutorFailed where only another process would help: a step hangs, or the engine stopped.
        A full disk, and whatever else keeps it from being ready, is no reason to be started again."""
        if (why := self._hang()) or (why := self._stopped()):
            raise ExecutorFailed(why)

    def _stopped(self) -> str:
        readiness = self.engine.readiness()
        return readiness.reasons[0] if readiness.is_over else ""

    def load(self) -> Load:
        stats = self.engine.stats()
        told = [run for run in self._runs.values() if not run.is_told]
        waiting = sum(run.num_waiting_tokens for run in told)
        return Load(len(told), waiting, stats.kv_blocks_total - stats.kv_blocks_used)


class _Run:
    """A request that an ingress listens to. `num_outputs`: tokens of its answer."""

    def __init__(self, stream: Stream, journey: str, num_outputs: int):
        self.stream, self.journey, self.num_outputs = stream, journey, num_outputs
        self.why = ""  # it is to move
        self.is_told = False  # its ingress hears no more
        self.gone = asyncio.Event()  # the engine has it no more
        self._come = asyncio.Event()

    def listen(self) -> None:
        self.stream.listen(self._come.set)

    def leave(self, why: str) -> None:
        self.why = why
        self._come.set()

    async def wait(self, limit_s: float) -> bool:
        """Whether something came within so long, or it is to move."""
        self._come.clear()
        if self.stream.backlog or self.why:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await self._come.wait()
        return False

    @property
    def num_waiting_tokens(self) -> int:
        return 0 if self.num_outputs else self.stream.num_prompt_tokens


def _refusal(error: MMEngineError) -> Rejection | Redirect:
    """An engine that stopped says nothing of the request: another one may answer it."""
    if isinstance(error, ExecutorFailed):
        return Redirect(str(error))
    return Rejection.by(error)

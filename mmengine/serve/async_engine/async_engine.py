"""The engine for many callers at once: it runs on its own thread, answers come as async streams.

    async with AsyncEngine() as engine:
        async with engine.stream("What is a triangle?") as stream:
            async for output in stream:
                print(output.text, end="")

Callers speak to the thread through a queue of commands. What it knows of a caller is a channel; a
`Stream` that is closed, or forgotten, closes its channel, and that cancels the request.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from mmengine.core.outputs import Stats
from mmengine.core.resume import Resume
from mmengine.errors import ExecutorFailed, InvalidRequest, MMEngineError, QueueFull, RequestFailed
from mmengine.models.plugin import Prepared, Processor
from mmengine.processing.workers.attempt import GIVEN_UP, AttemptOver
from mmengine.request import SamplingParams
from mmengine.serve.async_engine.adapters import AsyncAdapters
from mmengine.serve.async_engine.preparation import FORM_WORKERS, Preparation, Preparing
from mmengine.serve.async_engine.recovery import AsyncLeft
from mmengine.serve.async_engine.sessions import AsyncSessions
from mmengine.serve.async_engine.typed_answers import AsyncForms
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.media_memory import media_workers, schema_processes_of
from mmengine.serve.prompt.options import FORM, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt, Prompted
from mmengine.serve.requests.health import Readiness, StepClock
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.requests.recovered_requests import left_of
from mmengine.serve.requests.request_times import Times
from mmengine.serve.stream.channel import Channel, deliver
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.output_text import AnswerTexts
from mmengine.serve.text.request_output import RequestOutput, ended, engine_failed, unbegun
from mmengine.serve.text.response_format import ResponseFormat, response_format_of

STEP_LIMIT_S = 60.0  # a step that takes longer hangs
MAX_HANGS = 32  # hangs in a row, before the streams hear of it


class AsyncEngine(AsyncForms, AsyncLeft, AsyncAdapters, AsyncSessions):
    """A model behind a thread. Takes what `Engine` takes; loading happens in the constructor.

    Media are decoded and resized on `media_workers` threads of their own, schemas and grammars are checked on
    others, before the media of the same request; texts without media have threads of their own as well. A
    request's deadline counts from `stream`, and within `prepare_timeout_s` of that it must be prepared.
    At most `max_waiting + max_num_seqs` requests are open at once; one more raises QueueFull. Where a step
    gets no further for step_timeout_s and there is a `log`, another engine takes that up on a thread of its
    own and the streams go on; without a log they end with an error.

    A path in a message is read on this machine. Messages of strangers are passed as
    `Prompt(messages, media_options={"local_files": False})`, which refuses paths.
    """

    def __init__(self, model: str | Path | None = None, **engine_options: Any):
        options = {"on_hang": self._on_hang, "untrusted": True, **engine_options, "texts": False}
        self._make_engine = partial(Engine, model, **options)
        self._has_log = engine_options.get("log") is not None
        self._num_hangs = 0  # in a row: 0 again when a step comes back
        self._is_stuck = False  # the engine's thread hangs, and no other engine takes over
        self._told_times: Callable[[str, Times], None] | None = None
        self._engine = self._make_engine()
        self._left, nobodys = left_of(self._engine.requests.resumed)
        for core_id in nobodys:  # else the log kept it for ever
            self._engine.requests.drop_resumed(core_id)
        self.config = self._engine.config
        self._limit = self.config.max_waiting + self.config.max_num_seqs
        workers = media_workers(self.config.media_workers)
        self._schemas = schema_processes_of(self.config, FORM_WORKERS) if options["untrusted"] else None
        work_out = None if self._schemas is None else self._schemas.gated
        self._preparation = Preparation(lambda: self._engine, workers, self._prepared, work_out)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reads_adapters = ThreadPoolExecutor(1, "adapters")
        self._lock = threading.Lock()  # guards _open, _left, _closing and _failure
        self._open: set[Channel] = set()
        self._closing = self._leaving = False
        self._failure: MMEngineError | None = None
        self._preparing: dict[Channel, Preparing] = {}  # like the next two, the engine's thread's alone
        self._running: dict[str, Channel] = {}
        self._unwritten: list[Channel] = []  # channels whose requests no step has written down yet
        self._stats = replace(self._engine.stats())
        self._take_metrics()
        self.step_clock = StepClock()
        self._begin()

    def _take_metrics(self) -> None:
        self.metrics = self._engine.metrics
        if self._told_times is not None:
            self.metrics.tell_times(self._told_times)
        self.metrics.ready = lambda: self.readiness().ready
        self.metrics.preparing = self._preparation.standing

    def tell_times(self, told: Callable[[str, Times], None]) -> None:
        """Call it, on the engine's thread, with the id of each answer that is over, and its times."""
        self._told_times = told
        self.metrics.tell_times(told)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, args=(self._engine,), name="mmengine", daemon=True)
        self._thread.start()

    @property
    def processor(self) -> Processor:
        """Of the model; any thread may use it."""
        return self._engine.processor

    @property
    def has_log(self) -> bool:
        """Whether what is accepted outlives this process."""
        return self._has_log

    @property
    def can_end_reasoning(self) -> bool:
        """Whether thinking_token_budget is taken."""
        return self._engine.reasoning.can_end

    @property
    def max_open(self) -> int:
        """Requests that may be open at once."""
        return self._limit

    # Any thread with a running event loop

    def stream(
        self,
        prompt: Prompted,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream:
        """Start answering; arguments as for `Engine.submit`. `hold`: the answer counts as delivered when the
        stream is told so, not when it was handed over: until then, whoever goes on with the log has it again.
        Raises InvalidRequest, QueueFull; what is wrong with the media, or with the form asked for, comes out
        of the stream."""
        asked = make_options(sampling, options)
        asked.check()
        asked.sampling.check_vocabulary(self._engine.built.spec.vocab_size)
        has_form = any(options.get(name) is not None for name in FORM)
        form = partial(response_format_of, options) if has_form else None
        channel = Channel(asked, AnswerTexts(self._engine.processor.tokenizer, asked.sampling), hold)
        self._prepare(channel, Prompt.of(prompt), form)
        return Stream(channel, self._close_channel, self.let_go)

    async def count(self, prompt: Prompted) -> int:
        """Tokens of a prompt with its media, which is prepared as that of a request. Raises what `stream`
        does, and what comes out of one."""
        asked = make_options(None, {})
        texts = AnswerTexts(self._engine.processor.tokenizer, asked.sampling)
        self._prepare(channel := Channel(asked, texts, is_count=True), Prompt.of(prompt), None)
        try:
            await channel.accepted.wait()
        finally:
            self._close_channel(channel)
        if channel.error is not None:
            raise channel.error
        return channel.num_prompt_tokens

    def _prepare(self, channel: Channel, prompt: Prompt, form: Callable[[], ResponseFormat] | None) -> None:
        """Raises InvalidRequest, QueueFull."""
        with self._lock:
            if self._failure is not None:
                raise engine_failed(self._failure)
            if self._closing:
                raise InvalidRequest("the engine is closed")
            if len(self._open) >= self._limit:
                raise QueueFull(f"{self._limit} requests are open already; try again later")
            self._open.add(channel)
        request = Preparing(channel, prompt, form, self.config.prepare_timeout_s)
        self._commands.put(lambda: self._preparing.update({channel: request}))
        if request.limit_s is not None:
            expire = partial(self._commands.put, partial(self._expire, channel))
            channel.timer = channel.loop.call_later(request.limit_s, expire)
        self._preparation.begin(request)

    def _prepared(self, request: Preparing, result: Prepared | Exception) -> None:
        """On a thread of the preparation."""

        def take() -> None:
            if not self._load_first(request, result):
                self._submit(request, result)

        self._commands.put(take)

    def stats(self) -> Stats:
        """Counters of the core since the start, as of the last step."""
        return self._stats

    def metrics_text(self) -> str:
        """Counters and times in Prometheus' text format; `metrics` is the collector behind it. Any thread
        may ask."""
        return self.metrics.text()

    def readiness(self) -> Readiness:
        """What `Engine.readiness` says, whether the engine's thread lives and its step returns, and how
        preparation gets on. Any thread may ask."""
        if self._failure is not None or not self._thread.is_alive():
            why = str(self._failure or "it was closed").removeprefix("the engine stopped: ")
            return Readiness((f"the engine stopped: {why}",), is_over=True)
        reasons = self._engine.readiness().reasons
        standing = self._preparation.standing()
        reasons += standing.reasons
        if (step_s := self.step_clock.seconds) > STEP_LIMIT_S:
            reasons += (f"a step has not returned for {step_s:.0f} seconds",)
        return Readiness(reasons + (("the engine is closing",) if self._closing else ()), *standing)

    async def close(self, *, drain: bool = True, leave: bool = False) -> None:
        """Take no more requests, finish those that run (`drain`), or cancel them, or `leave` them in the log
        for whoever goes on with it; and free the device. Closing twice is no error."""
        with self._lock:
            self._closing, self._leaving = True, leave
            channels = [] if drain or leave else list(self._open)
        for channel in channels:
            self._close_channel(channel)
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._join)
        await asyncio.to_thread(self._preparation.close)
        if self._schemas is not None:
            self._schemas.close()
        while not self._commands.empty():  # of requests that were given up while a thread prepared them
            self._commands.get()()
        for channel in list(self._open):
            self._end(channel, RequestFailed("the engine was closed; the request stays in its log"))

    def _join(self) -> None:
        """Wait for the engine's thread, and for a thread that takes over from it; not for a stuck thread."""
        while (thread := self._thread).is_alive() and not self._is_stuck:
            thread.join(0.05)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, kind: type | None, *exc: object) -> None:
        await self.close(drain=kind is None)

    def _close_channel(self, channel: Channel) -> None:
        if not channel.closed:
            channel.closed = True
            self._commands.put(lambda: self._cancel(channel))

    # The engine's thread

    def _run(self, engine: Engine) -> None:
        try:
            while not (self._closing and (self._leaving or not self._open)):
                self._take_commands()
                if engine.has_work:
                    self.step_clock.begin()
                    outputs = engine.step(received=False)
                    self.step_clock.end()
                    self._num_hangs = 0
                    self._stats = replace(engine.stats())
                    self._deliver(outputs)
                    self._acknowledge(engine)
                if self._closing:
                    engine.check_stall()
        except BaseException as error:  # every waiter must hear of it, whatever it is
            if engine is self._engine:
                self._fail_all(engine_failed(error))
        finally:
            try:
                if engine is self._engine:
                    engine.close()
            except Exception as error:
                self._fail_all(engine_failed(error))

    # The watchdog's thread, while the engine's is stuck

    def _on_hang(self) -> None:
        stuck = self._engine
        self._num_hangs += 1
        try:
            if not self._has_log or self._num_hangs > MAX_HANGS or not stuck.abandon():
                raise ExecutorFailed(stuck.hang_text)
            operator_log.error("engine hung", reason=stuck.hang_text)
            self._engine = self._make_engine(resume=Resume(awaited=frozenset(self._running)))
            self._take_up(stuck)
        except BaseException as error:
            self._fail_all(engine_failed(error))
            self._is_stuck = True
            return
        self.step_clock.end()
        self._take_metrics()
        self._begin()

    def _take_commands(self) -> None:
        """Run all commands; wait for one when the engine has nothing to do."""
        if not self._engine.has_work:
            self._run_next_command()
        while not self._commands.empty():
            self._commands.get()()

    def _submit(self, request: Preparing, result: Prepared | Exception) -> None:
        channel = request.channel
        try:
            if self._preparing.pop(channel, None) is None:
                return  # it was given up meanwhile
            if isinstance(result, AttemptOver):
                self._end_late(request)
            elif isinstance(result, Exception):
                raise result
            elif channel.is_count:
                self._end(channel, None)
            else:
                channel.request_id = self._engine.submit_prepared(result, request.options)
                self._note_session(channel)
                self._running[channel.request_id] = channel
                self._unwritten.append(channel)
        except MMEngineError as error:
            self._end(channel, error)
        except Exception as error:  # a bug of a processor ends its request, not the engine
            self._end(channel, engine_failed(error))
        finally:
            self._preparation.release(channel)

    def _expire(self, channel: Channel) -> None:
        """Its time is over; no matter where it was prepared before."""
        request = self._preparing.pop(channel, None)
        if request is not None:
            self._give_up(request)
            self._end_late(request)

    def _give_up(self, request: Preparing) -> None:
        self._preparation.give_up(request)
        self._preparation.release(request.channel)

    def _end_late(self, request: Preparing) -> None:
        """As the core ends a request whose deadline passes; or with an error."""
        channel = request.channel
        if not request.is_late:
            self._end(channel, request.too_slow())
            return
        news = ended(unbegun(channel.options.request_id, channel.options.sampling.n, "deadline"))
        self._forget(channel)
        deliver((channel, one) for one in news)

    def _cancel(self, channel: Channel) -> None:
        request = self._preparing.pop(channel, None)
        if request is not None:
            self._give_up(request)
            self._end(channel, RequestFailed(GIVEN_UP))
        elif channel.request_id in self._running:
            self._engine.cancel(channel.request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        over = [output.request_id for output in outputs if output.completion is not None]
        for request_id in over:  # its place is free before its caller hears, and may ask again
            self._forget(self._running[request_id])
        for channel in deliver((self._running[output.request_id], output) for output in outputs):
            channel.closed = True
            self._cancel(channel)
        for request_id in over:
            if not self._running.pop(request_id).is_held:
                self._engine.requests.delivered(request_id)

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            self._open.discard(channel)

    def _end(self, channel: Channel, error: MMEngineError | None) -> None:
        self._forget(channel)
        try:
            channel.loop.call_soon_threadsafe(channel.end, error)
        except RuntimeError:
            return  # the caller's loop is closed

    def _fail_all(self, error: MMEngineError) -> None:
        operator_log.error("engine failed", reason=str(error))
        with self._lock:
            self._failure = self._failure or error
            channels = list(self._open)
        for request in list(self._preparing.values()):
            self._give_up(request)
        for channel in channels:
            self._end(channel, engine_failed(error))

"""Runs the engine on its own thread for many concurrent callers, and returns answers as async streams.

    async with AsyncEngine() as engine:
        async with engine.stream("What is a triangle?") as stream:
            async for output in stream:
                print(output.text, end="")

`Admission` prepares a prompt and submits the request, `EngineThread` steps the engine, and `OpenRequests`
passes the outputs to the caller's `Stream`. Closing or dropping a stream cancels its request.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from mmengine.core.outputs import Stats
from mmengine.errors import MMEngineError, RequestFailed
from mmengine.models.box_unit import BoxUnit
from mmengine.models.plugin import Processor
from mmengine.request import SamplingParams
from mmengine.serve.async_engine.admission import Admission
from mmengine.serve.async_engine.engine_thread import EngineThread
from mmengine.serve.async_engine.open_requests import OpenRequests
from mmengine.serve.async_engine.pooled_answers import AsyncPooledAnswers
from mmengine.serve.async_engine.preparation import FORM_WORKERS
from mmengine.serve.async_engine.recovery import Recovery
from mmengine.serve.async_engine.sessions import AsyncSession, AsyncSessions
from mmengine.serve.async_engine.typed_answers import AsyncAnswers
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pooling.pooled_model import PooledModel
from mmengine.serve.prompt.media_memory import media_workers, schema_processes_of
from mmengine.serve.prompt.options import FORM, Options, SessionOptions, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt, PromptInput
from mmengine.serve.requests.adapters import LocalAdapter
from mmengine.serve.requests.health import Readiness, stopped_engine
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.requests.recovery import RecoveredRequest
from mmengine.serve.requests.request_times import Times
from mmengine.serve.requests.sessions import IDLE_S, SessionFacts
from mmengine.serve.stream.channel import Channel
from mmengine.serve.stream.request_stream import HeldAnswer, Stream
from mmengine.serve.text.output_text import OutputText
from mmengine.serve.text.request_output import engine_failed
from mmengine.serve.text.response_format import ResponseFormat, response_format_of

STEP_LIMIT_S = 60.0  # a step that takes longer makes the engine not ready
STEP_FROZEN_S = 600.0  # a step that takes longer sets `Readiness.is_frozen`
T = TypeVar("T")


class AsyncEngine(AsyncAnswers, AsyncPooledAnswers):
    """An engine that runs on its own thread. The constructor loads the model and takes `Engine`'s arguments.

    `media_workers` threads decode and resize media. Other threads check response formats and tokenize prompts
    without media. A deadline counts from the call to `stream`. A request's preparation must end within
    `prepare_timeout_s`. At most `max_waiting + max_num_seqs` requests are open at the same time. A further
    request raises QueueFull.

    A step that makes no progress for `step_timeout_s` counts as hung. With a `log`, a new engine then resumes
    the log on a new thread, and the streams continue. Without a log the streams end with an error.

    A file path in a message is read on this machine. To refuse paths in messages from untrusted clients, pass
    `Prompt(messages, media_options={"local_files": False})`.
    """

    def __init__(self, model: str | Path | None = None, **engine_options: Any):
        options = {"untrusted": True, **engine_options, "texts": False}
        self._report_times: Callable[[str, Times], None] | None = None
        self._thread = EngineThread(model, options, replaced=self._resume_after_hang, failed=self._fail_all)
        self.step_clock = self._thread.step_clock
        self.config = config = self._engine.config
        self._open = OpenRequests(config.max_waiting + config.max_num_seqs)
        self._recovery = Recovery(self._thread, self._open)
        self._schemas = schema_processes_of(config, FORM_WORKERS) if options["untrusted"] else None
        self._admission = Admission(
            self._thread,
            self._open,
            media_workers(config.media_workers),
            None if self._schemas is None else self._schemas.gated,
            config.prepare_timeout_s,
        )
        self._sessions = AsyncSessions(self._thread, self.count, self._submit)
        # a single worker, so that adapters are read one at a time, which limits memory
        self._adapter_reader = ThreadPoolExecutor(1, "adapters")
        self._connect_metrics()
        self._thread.start(self._open)

    @property
    def _engine(self) -> Engine:
        """The current engine; after a hung step a new engine replaces it."""
        return self._thread.engine

    def _connect_metrics(self) -> None:
        self.metrics = self._engine.metrics
        if self._report_times is not None:
            self.metrics.tell_times(self._report_times)
        self.metrics.ready = lambda: self.readiness().ready
        self.metrics.preparing = self._admission.preparation.backlog

    def tell_times(self, report: Callable[[str, Times], None]) -> None:
        """Have the engine's thread call `report(request_id, times)` when a request ends."""
        self._report_times = report
        self.metrics.tell_times(report)

    @property
    def processor(self) -> Processor:
        """The model's processor. Thread-safe."""
        return self._engine.processor

    @property
    def has_log(self) -> bool:
        """Whether accepted requests survive when this process ends."""
        return self._thread.has_log

    @property
    def keeps_held(self) -> bool:
        """Whether answers that are kept with `hold` survive when this process ends."""
        return self._thread.has_log

    @property
    def can_end_reasoning(self) -> bool:
        """Whether the option thinking_token_budget is supported."""
        return self._engine.reasoning.can_end

    @property
    def pooled(self) -> PooledModel:
        """The model's task (chat, embedding or reranking), and its settings for pooled requests."""
        return self._engine.pooled

    @property
    def width(self) -> int:
        """How many values the model's embedding vectors have."""
        return self._engine.built.spec.hidden_size

    def box_unit(self) -> BoxUnit:
        """Return how the model writes boxes. Raises InvalidRequest if the plugin does not declare it."""
        return self._engine.box_unit()

    @property
    def max_open(self) -> int:
        """Maximum number of concurrently open requests."""
        return self._open.limit

    # The request methods need a running event loop. Any thread may call them.

    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream:
        """Submit a prompt and return its output stream. The arguments are those of `Engine.submit`.

        The log keeps the answer until the stream has returned the last output or, with `hold`, until the
        caller calls the stream's `delivered`. A later process that resumes the log can return every answer
        that is still kept. Raises InvalidRequest and QueueFull. Errors in media and in the response format
        are raised when the caller reads the stream.
        """
        has_form = any(options.get(name) is not None for name in FORM)
        form = partial(response_format_of, options) if has_form else None
        return self._submit(Prompt.of(prompt), make_options(sampling, options), form, hold)

    def stream_job(self, prompt: Prompt, options: Options) -> Stream:
        """Submit a prompt with checked options, and return its output stream."""
        return self._submit(prompt, options, None, False)

    def _submit(
        self, prompt: Prompt, options: Options, form: Callable[[], ResponseFormat] | None, hold: bool
    ) -> Stream:
        options.check()
        options.sampling.check_vocabulary(self._engine.built.spec.vocab_size)
        channel = Channel(options, OutputText(self.processor.tokenizer, options.sampling), hold)
        self._admission.add(channel, prompt, form)
        return Stream(channel, self._close_channel, self.release_answers)

    async def count(self, prompt: PromptInput) -> int:
        """Return the prompt's token count, including media tokens.

        The prompt is prepared as for a request. Raises the same errors as `stream` and as reading the stream.
        """
        options = make_options(None, {})
        texts = OutputText(self.processor.tokenizer, options.sampling)
        self._admission.add(channel := Channel(options, texts, is_count=True), Prompt.of(prompt), None)
        try:
            await channel.accepted.wait()
        finally:
            self._close_channel(channel)
        if channel.error is not None:
            raise channel.error
        return channel.num_prompt_tokens

    def _close_channel(self, channel: Channel) -> None:
        if not channel.closed:
            channel.closed = True
            self._thread.put(lambda: self._admission.cancel(channel))

    # The methods below concern requests that the previous process left in the log.

    def recovered_requests(self) -> list[RecoveredRequest]:
        """Return the previous process's running and ended requests to which no caller is attached."""
        return self._recovery.waiting()

    def attach(self, request_id: str, *, hold: bool = False) -> Stream:
        """Return a stream for a request from the previous process.

        The stream begins with the answer's first token. `hold` has the same meaning as for `stream`. Raises
        InvalidRequest if `recovered_requests` does not list the request.
        """
        return Stream(self._recovery.attach(request_id, hold=hold), self._close_channel, self.release_answers)

    def give_up(self, request_id: str) -> None:
        """Cancel a running request from the previous process, or drop an ended request's answer.

        Raises InvalidRequest if `recovered_requests` does not list the request.
        """
        self._recovery.give_up(request_id)

    def release_answers(self, answers: list[HeldAnswer]) -> None:
        """Allow the log to delete these held answers. Call this when the answers are stored elsewhere."""
        self._recovery.release(answers)

    async def settled(self) -> None:
        """Wait until the log has recorded all earlier calls to `release_answers`, or until the engine has
        failed.
        """
        await self._recovery.settled()

    # Sessions and adapters.

    async def session(
        self,
        session_id: str = "",
        *,
        idle_s: float = IDLE_S,
        media_options: Mapping[str, object] | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """Open a new session. The arguments are the same as for `Engine.session`.

        To continue an open session, use `attach_session`. The option `envelope` takes bytes that the log
        stores with the session. Raises QueueFull, and InvalidRequest, for example if the id belongs to an
        open session.
        """
        return await self._sessions.open(session_id, idle_s, media_options, options)

    def attach_session(
        self, session_id: str, media_options: Mapping[str, object] | None = None
    ) -> AsyncSession:
        """Return a session that another caller or the previous process opened.

        The session's methods raise InvalidRequest if the session is closed.
        """
        return self._sessions.attach(session_id, media_options)

    async def sessions(self) -> list[SessionFacts]:
        """Return facts about all open sessions, including sessions from the previous process."""
        return await self._sessions.facts()

    @property
    def adapters(self) -> tuple[LocalAdapter, ...]:
        """The LoRA adapters that requests can name. Thread-safe."""
        return tuple(self._engine.adapters)

    async def load_adapter(self, name: str, source: str) -> LocalAdapter:
        """Read an adapter and load it between two steps.

        Requests can name the adapter once this call returns. An adapter with the same name is replaced.
        Concurrent calls read their adapters one at a time. Raises ModelError, ConfigError, InvalidRequest and
        RequestFailed.
        """
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(self._adapter_reader, self._engine.adapters.read, name, source)
        await self._thread.call(lambda engine: engine.adapters.load(known))
        return known

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter.

        New requests for the adapter are refused, and running requests continue to use it. Raises
        InvalidRequest for an unknown adapter, and RequestFailed if the engine has failed.
        """
        await self._thread.call(lambda engine: engine.adapters.unload(name))

    # The methods below call the engine's thread, or report the thread's state.

    async def on_engine(self, function: Callable[[Engine], T]) -> T:
        """Call `function` on the engine's thread between two steps, and return its result.

        Raises the same errors as `function`, RequestFailed if the engine has failed, and InvalidRequest if
        the engine has ended.
        """
        return await self._thread.call(function)

    def stats(self) -> Stats:
        """Return the engine core's counters, as of the last step."""
        return self._thread.stats

    def metrics_text(self) -> str:
        """Return the metrics in Prometheus' text format. Thread-safe."""
        return self.metrics.text()

    def readiness(self) -> Readiness:
        """Return whether the engine is ready for more requests, and the reasons if it is not.

        The check covers the engine, its thread, the current step and the requests in preparation.
        Thread-safe.
        """
        if self._open.failure is not None or not self._thread.is_alive:
            return stopped_engine(self._open.failure)
        found, backlog = self._engine.readiness(), self._admission.preparation.backlog()
        more = backlog.reasons
        if (step_s := self.step_clock.seconds) > STEP_LIMIT_S:
            more += (f"a step has not returned for {step_s:.0f} seconds",)
        if self._open.is_closing:
            more += ("the engine is closing",)
        reasons, public = found.reasons + more, found.public_reasons + more
        return Readiness(
            reasons,
            backlog.num_requests,
            backlog.oldest_s,
            public=public,
            is_frozen=step_s > STEP_FROZEN_S,
            stuck=found.stuck,
        )

    async def close(self, *, drain: bool = True, leave: bool = False) -> None:
        """Refuse new requests, end the open requests, and free the device.

        With `drain`, open requests finish first. With `leave`, open requests stay in the log for the next
        process, and prompts in preparation are cancelled. Without `drain` and `leave`, open requests are
        cancelled. A second call does nothing.
        """
        self._thread.leaves = leave
        self._open.close()
        for channel in () if drain or leave else self._open:
            self._close_channel(channel)
        self._thread.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        if leave:
            self._admission.give_up_all()
        await asyncio.to_thread(self._admission.close)
        if self._schemas is not None:
            self._schemas.close()
        self._thread.run_queued()  # handles preparations that ended after the engine's thread had stopped
        for channel in self._open:
            self._open.end(channel, RequestFailed("the engine was closed; the request stays in the log"))

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, kind: type | None, *exc: object) -> None:
        await self.close(drain=kind is None)

    def _resume_after_hang(self, stuck: Engine) -> None:
        self._recovery.resume_streams(stuck)
        self._connect_metrics()

    def _fail_all(self, error: MMEngineError) -> None:
        operator_log.error("engine failed", reason=str(error))
        self._admission.give_up_all()
        self._open.fail(engine_failed(error))

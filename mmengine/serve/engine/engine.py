"""The engine for use on a single thread. The caller submits prompts and steps the engine.

Example:

    with Engine() as engine:
        print(engine.generate(["What is a triangle?"], max_tokens=32)[0].text)
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mmengine.config import EngineConfig
from mmengine.core.outputs import Output, Stats
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest, MMEngineError
from mmengine.models.plugin import Prepared
from mmengine.request import SamplingParams
from mmengine.serve.batch.run_batch import Job, Result, outputs_of, run_batch
from mmengine.serve.engine.pooled_answers import PooledAnswers
from mmengine.serve.engine.session import Session
from mmengine.serve.engine.typed_answers import TypedAnswers
from mmengine.serve.pooling.pooled_model import pooled_model_of
from mmengine.serve.prompt.media_memory import MediaMemory, decoders_of
from mmengine.serve.prompt.options import Options, SessionOptions, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt, PromptInput
from mmengine.serve.prompt.prompt_media import PromptMedia
from mmengine.serve.requests.adapters import Adapters
from mmengine.serve.requests.failure_report import report_failure
from mmengine.serve.requests.health import HANG_EXIT, EngineHealth, Readiness, Watchdog
from mmengine.serve.requests.log_sync import LogSyncer
from mmengine.serve.requests.metrics import engine_metrics
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.requests.recovery import open_log
from mmengine.serve.requests.request_resources import GrammarMemory, RequestResources
from mmengine.serve.requests.running_requests import RunningRequests
from mmengine.serve.requests.sessions import IDLE_S, SessionSettings, make_sessions
from mmengine.serve.requests.submission import LargeMedia, Submission
from mmengine.serve.text.reasoning import Reasoning
from mmengine.serve.text.request_output import Completion, RequestOutput
from mmengine.serve.text.response_format import response_format_of
from mmengine.serve.text.stop_strings import StopStrings
from mmengine.setting_names import with_settings

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built

ARGUMENTS = ("model", "config", "device", "dtype", "attention", "log", "resume", "loras", "untrusted")
GRAMMAR_PAUSE_S = 0.02  # seconds for which a step waits if all requests wait for their grammars


class Engine(TypedAnswers, PooledAnswers):
    """Runs a model on the caller's thread. Not thread-safe; AsyncEngine serves many callers.

    * `model`: a model folder, a hub id, or None for the small checkpoint in this package.
    * `device`, `dtype`: names such as "cpu" and "bfloat16", or torch's objects.
    * `config`: all settings. Keywords in `settings`, such as `max_model_len=4096`, replace single settings in
      `config`.
    * `log`: folder for the event log. With None, a log with limited size is kept in memory.
    * `resume`: how to continue an existing log in the folder `log`. The log's unfinished requests then
      continue. `requests.resume` returns these requests' answers and all answers that were not delivered.
    * `on_hang`: called on another thread when a step makes no progress for step_timeout_s. With None, the log
      records the hang and the process ends.
    * `texts`: with False, outputs have token ids but no text, so that callers can decode the ids on another
      thread.
    * `untrusted`: whether media come from untrusted callers. With `media_decoding="auto"`, separate processes
      then decode the media.
    * `loras`: LoRA adapters as a dict from the name in requests to a folder or a hub id. Pass {} if adapters
      will only be loaded later.
    * `builder`: replaces `mmengine.build.build` in tests.

    A path in a message is read on this machine. Pass messages from untrusted clients as `Prompt(messages,
    media_options={"local_files": False})`. Raises ModelError, ConfigError, LogError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        device: str = "auto",
        dtype: str = "auto",
        attention: str = "auto",
        log: str | Path | None = None,
        resume: Resume | None = None,
        on_hang: Callable[[], None] | None = None,
        texts: bool = True,
        untrusted: bool = False,
        loras: Mapping[str, str | Path] | None = None,
        builder: "Callable[..., Built] | None" = None,
        **settings: Any,
    ):
        self.built = (builder or _builder())(
            model,
            config=with_settings(config, settings, ARGUMENTS),
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            attention=attention,
            log=Path(log) if log is not None else None,
            resume=resume,
            stop_watcher_factory=StopStrings,
            **({} if loras is None else {"takes_adapters": True}),
        )
        self.processor = self.built.processor
        self.config = self.built.config
        self._core, self._grammars = self.built.core, self.built.grammars
        self.pooled = pooled_model_of(self.built)
        self.batch_done: dict[str, Completion] = {}  # ended answers that no `run_batch` has yielded
        self._closed = False
        self._received = True  # whether the next step marks the last step's answers as delivered
        self.media_memory = MediaMemory(self.config.media_ahead_bytes)
        self.grammar_memory = GrammarMemory()
        media_cache = getattr(self.processor, "media_cache", None)
        if media_cache is not None:
            media_cache.max_bytes = self.config.media_cache_bytes
        self.processor.max_prompt_tokens = self.config.max_model_len - 1
        self.decoders = decoders = decoders_of(self.processor, self.config, untrusted)
        if decoders is not None:
            self.processor.media_decoder = decoders
        self._health = EngineHealth(self._core, self._grammars, decoders)
        self.metrics = engine_metrics(self.built, self.readiness, media_cache, decoders)
        self.adapters = Adapters(self.built)
        with self._log_closed_on_error():
            initial = [self.adapters.read(name, source) for name, source in (loras or {}).items()]
            store, resumed = open_log(self.built, log, resume, self.grammar_memory, self.adapters, initial)
            for known in initial:
                self.adapters.load(known)
        self._log = None if log is None else Path(log)
        self._syncer = None if log is None else LogSyncer.of(self._core, self.config)
        built, tokenizer = self.built, self.processor.tokenizer
        self._resources = RequestResources(built, self.media_memory, self.grammar_memory, self.metrics, store)
        self._resources.add(self.adapters)
        self.requests = RunningRequests(self._core, tokenizer, resumed, built.grammars.backend.notes, texts)
        markers = self.config.reasoning_start, self.config.reasoning_end
        self.reasoning = Reasoning(tokenizer, self.config.eos_token_ids, *markers)
        awaited = resume.awaited if resume is not None else frozenset()
        self.sessions = make_sessions(
            self._core, store, self.processor, self.adapters, self.requests, awaited
        )
        parts = self._resources, self.requests, self.metrics
        pools = self.grammar_memory, self.sessions, self.adapters
        self._submission = Submission(built, *parts, self.reasoning, *pools)
        limit_s = self.config.step_timeout_s
        self._watchdog = Watchdog(limit_s, on_hang or self._end_process) if limit_s else nullcontext()
        operator_log.info("engine ready", model=str(built.folder), device=built.device, dtype=built.dtype)

    @contextmanager
    def _log_closed_on_error(self) -> Iterator[None]:
        """Close the log if the constructor fails. No event is written, since no request has begun."""
        try:
            yield
        except BaseException:
            self._core.sink.close()
            raise

    def submit(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[SubmitOptions],
    ) -> str:
        """Queue a prompt and return its request id.

        Pass sampling parameters as `sampling` or as keywords (`max_tokens=64, temperature=0.7, n=2, …`).
        Further options are `request_id`, `priority`, `cache_salt`, `deadline_s`, and `response_format` or
        `grammar` for the answer's format (docs/how-to/structured_output.md). With `stream` False, only
        complete answers have text, which saves work. If another engine with the same weights has already
        sampled the answer's first tokens, pass their ids as the option `outputs`. This engine's outputs begin
        after these tokens. If InvalidRequest, InvalidMedia or QueueFull is raised, nothing is queued.
        """
        begun = time.monotonic()
        form = response_format_of(options)
        request_options = form.added_to(make_options(sampling, options))
        request_options.check()
        with PromptMedia(Prompt.of(prompt)) as media:
            prepared = media.prompt().prepare(self.processor, request_options)
        return self.submit_prepared(prepared, request_options.after(time.monotonic() - begun), stream=stream)

    def submit_prepared(self, prepared: Prepared, options: Options, *, stream: bool = True) -> str:
        """Queue a prompt whose tokens and pixels are already prepared, perhaps on another thread."""
        if self._closed:
            raise InvalidRequest("the engine is closed")
        if not options.is_prefill:
            self.pooled.check_chats()
        return self._submission.submit(prepared, options, stream=stream)

    @property
    def has_work(self) -> bool:
        """Whether there are requests or log records that a step would process."""
        return self._core.has_work

    def check_batchable(self) -> None:
        """Raise InvalidRequest if requests that were submitted with `stream` are running.

        `run_batch` steps the engine, so these requests' outputs would be lost.
        """
        if self.requests.has_streams:
            raise InvalidRequest("submitted requests are running: call step until has_work is False")

    @property
    def stalled(self) -> bool:
        """Whether the log's disk is full.

        While the disk is full, new requests are refused, and running requests continue as long as the log's
        reserved disk space lasts. Each `step` checks again whether the disk has room.
        """
        return bool(self._core.stalled)

    def check_stall(self, limit_s: float | None = None) -> None:
        """Raise LogError if no request has progressed for `limit_s` seconds because the disk is full.

        The default limit is a minute. A server may wait for room on the disk, but a batch or a closing engine
        must not wait forever.
        """
        self._health.check_stall(limit_s)

    def is_on_disk(self, request_id: str) -> bool:
        """Return whether the log contains the QUEUED events for all the request's choices.

        If the log is a folder on disk, a later process can complete a request for which this method returns
        True.
        """
        return all(map(self._core.is_on_disk, self.requests.core_ids(request_id)))

    def on_large_media(self, listener: Callable[[LargeMedia], None]) -> None:
        """Register `listener` for queued images and videos that take long to encode."""
        self._submission.on_large_media = listener

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        return not self.requests

    def step(self, *, received: bool = True) -> list[RequestOutput]:
        """Compute a step and return the step's outputs, in the order in which the core returns them.

        The log keeps complete answers until they are delivered. With `received` (the default), this call
        marks all earlier answers as delivered. With `received=False`, call `requests.delivered` for each
        answer.
        """
        self._received = received
        if received:
            self.requests.all_delivered()
        try:
            self._settle_grammars()
            with self._watchdog:
                core_outputs = self._core.step()
            self.sessions.tidy()
            outputs = [self._take(output) for output in self.metrics.saw_step(core_outputs)]
            if self._syncer is not None:
                self._syncer.notify()
        except Exception as error:
            self._health.failed(error)
            report_failure(error, self._core.state, self._log)
            raise
        self._health.stepped(moved=bool(outputs))
        if not outputs and self._core.awaits_grammars:
            awaited = self.built.store or self._grammars
            awaited.wait(GRAMMAR_PAUSE_S)
        return [output for output in outputs if output is not None]

    def _settle_grammars(self) -> None:
        """Tell the core which awaited grammars are compiled or have failed."""
        for core_id, error in self._grammars.settled():
            if error:
                self._core.grammar_failed(core_id, error)
            else:
                self._core.grammar_ready(core_id)

    def _take(self, output: Output) -> RequestOutput | None:
        if output.finish_reason is not None:
            self._resources.release(output.request_id)
        return self.requests.take(output)

    def run_batch(self, jobs: Iterable[Job | MMEngineError]) -> Iterator[Result]:
        """Yield (index, completion or error) for each job when it ends, in any order.

        See batch/run_batch.py.
        """
        return run_batch(self, jobs)

    def outputs_of(self, request_id: str) -> AbstractContextManager[Iterator[RequestOutput]]:
        """Yield an iterator over a request's outputs.

        The iterator steps the engine. Leaving the `with` block cancels the request.
        """
        return outputs_of(self, request_id)

    def session(
        self,
        session_id: str = "",
        *,
        idle_s: float = IDLE_S,
        media_options: Mapping[str, object] | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Open a session, or continue an open session.

        A session is a prompt that grows (docs/how-to/sessions.md). Appended content is prefilled immediately,
        and questions about the content can be asked. `length` limits the session's tokens (0: max_model_len).
        When the limit is reached, the session keeps its anchor (see `Session.append`) and its most recent
        content, together at most `keep` tokens (0: half of the length). After `idle_s` seconds without a
        request, the session is closed (0: never). `adapter` names the LoRA adapter for the whole session. The
        id may name a session that the previous process opened. Raises InvalidRequest, QueueFull.
        """
        if session_id not in self.sessions.names():
            self.pooled.check_chats()
            session_id = self.sessions.open(session_id, SessionSettings.of(options), idle_s)
        return Session(self, session_id, media_options)

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Its last output has the finish_reason "abort".

        An id without a running request is ignored.
        """
        for core_id in self.requests.core_ids(request_id):
            self._core.cancel(core_id)

    def stats(self) -> Stats:
        """Return the counters since the core's start."""
        return self._core.stats()

    @property
    def drafters(self) -> list[tuple[str, int]]:
        """Each speculative drafter's name and failure count, in the same order as `stats().drafts`."""
        return self.built.executor.drafters

    def metrics_text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return self.metrics.text()

    def readiness(self) -> Readiness:
        """Return whether the engine should get more work, and the reasons if not.

        See EngineHealth.readiness.
        """
        return self._health.readiness(is_closed=self._closed)

    @property
    def hang_text(self) -> str:
        return f"a step made no progress for {self.config.step_timeout_s} seconds (step_timeout_s)"

    def abandon(self) -> bool:
        """Record in the log that the step hangs, and close the log for another engine.

        Called on another thread. Returns True if the log is closed; this engine must not be used afterwards.
        Does nothing and returns False if the step does not hang in a call to the device.
        """
        if not self._core.hang(f"hang: {self.hang_text}"):
            return False
        if self._syncer is not None:
            self._syncer.close()
        self._core.sink.close()
        self._grammars.close()
        if self.decoders is not None:
            self.decoders.close()
        return True

    def _end_process(self) -> None:
        self._core.hang(f"hang: {self.hang_text}")
        print(f"mmengine: {self.hang_text}", file=sys.stderr, flush=True)
        os._exit(HANG_EXIT)

    def close(self) -> None:
        """Free the device and close the log. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        operator_log.info("engine closes", model=str(self.built.folder))
        if self.decoders is not None:
            self.decoders.close()
        if self._syncer is not None:
            self._syncer.close()
        if isinstance(self._watchdog, Watchdog):
            self._watchdog.close()
        try:
            if self._received and self.is_idle:
                self.requests.all_delivered()
        finally:
            self.built.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _builder() -> "Callable[..., Built]":
    from mmengine.build import build  # lazy: importing mmengine.build imports torch

    return build

"""Prepares prompts on worker threads, within a time limit.

Separate threads prepare response formats, prompts without media, and prompts with media. A prompt without
media therefore never waits for media. The media fetcher has its own threads, so a slow URL delays only the
prompts with this URL.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mmengine.errors import RequestFailed
from mmengine.models.plugin import MediaInput, Prepared
from mmengine.processing.workers.attempt import GIVEN_UP, Attempt, AttemptOver
from mmengine.serve.async_engine.cancellable_workers import CancellableWorkers
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.prompt_media import PromptMedia, names_urls
from mmengine.serve.requests.session_media import Load
from mmengine.serve.stream.channel import Channel
from mmengine.serve.text.response_format import ResponseFormat
from mmengine.structured_output.json_schema.work import limited_work
from mmengine.structured_output.request.fields import Normalizer, normalize_large_by

FORM_WORKERS = 2  # two, because a large schema takes seconds and would delay other schemas
TEXT_WORKERS = 2  # two, so that a long text does not delay short texts
URL_WORKERS = 1  # the thread finds a prompt's URLs and begins to fetch them
CLOSE_S = 2.0  # how long `close` waits for running preparations, in seconds
# Seconds. If a prompt without media waits longer for a thread, the engine is "not ready".
STANDSTILL_S = 30.0


class PreparationBacklog(NamedTuple):
    """How many requests are in preparation, and how long the oldest has waited.

    `oldest_s`: the oldest request's age in seconds, not counting the time until its media are fetched.
    `text_wait_s`: how many seconds the oldest prompt without media has waited for a thread.
    """

    num_requests: int = 0
    oldest_s: float = 0.0
    text_wait_s: float = 0.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why preparation makes the engine "not ready"; empty if there are none.

        Slow schemas and media are never a reason, because they delay no other prompts.
        """
        if self.text_wait_s <= STANDSTILL_S:
            return ()
        return (f"a prompt without media has waited for preparation for {self.text_wait_s:.0f} seconds",)


class PreparingRequest:
    """A request in preparation. `form` builds the request's response format; None for free text."""

    def __init__(
        self,
        channel: Channel,
        prompt: Prompt,
        form: Callable[[], ResponseFormat] | None,
        timeout_s: float,
    ) -> None:
        self.channel, self.prompt, self.form = channel, prompt, form
        self.media: PromptMedia | None = None  # the prompt's media, while they are fetched and decoded
        self.loaded: tuple[MediaInput, ...] | None = None  # the session's older media, decoded again
        self.waits_since = self.queued_at = time.monotonic()
        self.timeout_s = timeout_s
        limits = [limit for limit in (channel.options.deadline_s, timeout_s) if limit]
        self.limit_s = min(limits) if limits else None
        self.attempt = Attempt(None if self.limit_s is None else channel.begun + self.limit_s)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.waits_since

    @property
    def is_over(self) -> bool:
        """Whether the request was cancelled or has reached its time limit."""
        return self.channel.closed or self.attempt.is_over

    def check(self) -> None:
        if self.is_over:
            raise AttemptOver(GIVEN_UP)

    @property
    def options(self) -> Options:
        """The options with which the request is submitted to the engine."""
        options = self.channel.options.after(self.channel.age_s)
        if options.place is None or self.loaded is None:
            return options
        return replace(options, place=replace(options.place, loaded=self.loaded))

    @property
    def is_late(self) -> bool:
        """Whether the request's deadline has passed."""
        deadline_s = self.channel.options.deadline_s
        return bool(deadline_s) and self.channel.age_s >= deadline_s

    def too_slow(self) -> RequestFailed:
        return RequestFailed(
            f"the prompt was not prepared within {self.timeout_s:g} seconds (prepare_timeout_s); send fewer "
            "or smaller images, or try again later"
        )


class Preparation:
    """Prepares requests for an engine on four worker thread pools.

    `engine` returns the current engine. `done(request, result)` is called on a worker thread. `done` is not
    called for requests that are cancelled while they wait. `work_out` normalizes large schemas; with None,
    the form threads normalize them.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        num_media_workers: int,
        done: Callable[[PreparingRequest, Prepared | Exception], None],
        work_out: Normalizer | None = None,
    ) -> None:
        self._engine, self._done, self._work_out = engine, done, work_out
        self._forms = CancellableWorkers[PreparingRequest](FORM_WORKERS, "mmengine-form")
        self._texts = CancellableWorkers[PreparingRequest](TEXT_WORKERS, "mmengine-text")
        self._media = CancellableWorkers[PreparingRequest](num_media_workers, "mmengine-media")
        self._urls = CancellableWorkers[PreparingRequest](URL_WORKERS, "mmengine-urls")
        self._workers = self._forms, self._texts, self._urls, self._media
        self._lock = threading.Lock()
        # Waiting requests, and requests that a thread prepares.
        self._requests: dict[PreparingRequest, None] = {}
        self._fetching: set[PreparingRequest] = set()  # requests whose media are being fetched

    def begin(self, request: PreparingRequest) -> None:
        with self._lock:
            self._requests[request] = None
        if request.form is not None:
            self._forms.put(request, partial(self._run_form, request, request.form))
        else:
            self._queue_prompt(request)

    def _queue_prompt(self, request: PreparingRequest) -> None:
        if request.prompt.has_media and names_urls(request.prompt):
            self._urls.put(request, partial(self._fetch, request))
            return
        request.queued_at = time.monotonic()
        workers = self._media if request.prompt.has_media else self._texts
        workers.put(request, partial(self._run_prompt, request))

    def _fetch(self, request: PreparingRequest) -> None:
        with self._lock:
            self._requests.pop(request, None)
            self._fetching.add(request)
        try:
            request.check()
            request.media = PromptMedia(
                request.prompt, partial(self._fetched, request), lambda: request.is_over
            )
        except Exception as error:
            self._end(request, error)

    def _fetched(self, request: PreparingRequest, media: PromptMedia) -> None:
        """Queue a request whose media have arrived. Called on a fetcher's thread or on the URL thread."""
        try:
            request.prompt = media.prompt()
            request.check()
        except Exception as error:
            media.release()
            self._end(request, error)
        else:
            request.media = media
            with self._lock:
                self._fetching.discard(request)
                self._requests[request] = None
                request.waits_since = time.monotonic()
            self._media.put(request, partial(self._run_prompt, request))

    def _run_form(self, request: PreparingRequest, form: Callable[[], ResponseFormat]) -> None:
        try:
            request.check()
            with (
                request.attempt.on_this_thread(),
                normalize_large_by(self._work_out),
                limited_work(request.check),
            ):
                made = form()
            self._settle(request.channel, made)
        except Exception as error:
            self._end(request, error)
        else:
            self._queue_prompt(request)

    def _settle(self, channel: Channel, form: ResponseFormat) -> None:
        """Add the response format to the request's options. The format's memory stays reserved until
        `release` is called.
        """
        if form.grammar is None:
            return
        options = form.added_to(channel.options)
        options.check()
        grammar = self._engine().grammar_memory.hold(channel, form.grammar)
        channel.options = replace(options, grammar=grammar)
        channel.texts.grammar = grammar

    def _run_prompt(self, request: PreparingRequest) -> None:
        try:
            with request.attempt.on_this_thread():
                result: Prepared | Exception = self._prepared(request)
        except Exception as error:
            result = error
        finally:
            if request.media is not None:
                request.media.release()
        self._end(request, result)

    def _prepared(self, request: PreparingRequest) -> Prepared:
        """Prepare the prompt. The memory for the prompt's pixels stays reserved until `release` is called."""
        engine = self._engine()
        if request.prompt.has_media:
            engine.media_memory.wait_for_room(lambda: request.is_over)
        request.check()
        channel = request.channel
        prepared = request.prompt.prepare(engine.processor, channel.options)
        engine.media_memory.hold(channel, prepared.media)
        items = (media.item for media in prepared.media)
        channel.take_prompt(prepared.prompt_token_ids, items, engine.reasoning)
        return prepared

    def load(self, request: PreparingRequest, prepared: Prepared, loads: Sequence[Load]) -> None:
        """Decode a session's older media on a worker thread, and then call `done` a second time."""
        with self._lock:
            self._requests[request] = None
            request.waits_since = time.monotonic()
        self._media.put(request, partial(self._run_loads, request, prepared, loads))

    def _run_loads(self, request: PreparingRequest, prepared: Prepared, loads: Sequence[Load]) -> None:
        try:
            with request.attempt.on_this_thread():
                request.loaded = self._loaded(request, prepared, loads)
        except Exception as error:
            self._end(request, error)
        else:
            self._end(request, prepared)

    def _loaded(
        self, request: PreparingRequest, prepared: Prepared, loads: Sequence[Load]
    ) -> tuple[MediaInput, ...]:
        """Decode the session's older media in order until the media memory is full, and return them.

        The first item is decoded even if the memory is full. Each remaining item is decoded later, by the
        first step that needs the item.
        """
        memory, channel = self._engine().media_memory, request.channel
        memory.release(channel)  # otherwise the request could wait for memory that its own pixels take
        memory.wait_for_room(lambda: request.is_over)
        memory.hold(channel, prepared.media)
        loaded: list[MediaInput] = []
        for load in loads:
            request.check()
            if loaded and not memory.has_room:
                break
            loaded.append(load())
            memory.hold(channel, loaded[-1:])
        return tuple(loaded)

    def _end(self, request: PreparingRequest, result: Prepared | Exception) -> None:
        self._forget(request)
        self._done(request, result)

    def _forget(self, request: PreparingRequest) -> None:
        with self._lock:
            self._requests.pop(request, None)
            self._fetching.discard(request)

    def release(self, channel: Channel) -> None:
        """Release the request's pixels and response format after submission or cancellation."""
        self._engine().media_memory.release(channel)
        self._engine().grammar_memory.release(channel)

    def give_up(self, request: PreparingRequest) -> None:
        """Cancel a preparation: remove its queued calls and stop its decoding process, if any."""
        request.attempt.give_up()
        if request.media is not None:
            request.media.release()
        if any(workers.drop(request) for workers in self._workers):
            self._forget(request)

    def backlog(self) -> PreparationBacklog:
        with self._lock:
            oldest = next(iter(self._requests), None)
            number = len(self._requests) + len(self._fetching)
        text = self._texts.first_waiting
        text_wait_s = 0.0 if text is None else time.monotonic() - text.queued_at
        return PreparationBacklog(number, 0.0 if oldest is None else oldest.age_s, text_wait_s)

    def close(self) -> None:
        """Wait at most CLOSE_S seconds until all waiting requests are prepared and the threads have ended."""
        until = time.monotonic() + CLOSE_S
        for workers in self._workers:
            workers.close(until)

"""From a prompt to what the engine takes, beside the engine and within a limit of time.

Forms of answers, texts, and prompts with media are prepared on threads of their own each: nobody who brings
no image waits behind one. What a prompt names by a URL is fetched before, on the threads of the door, where
nobody waits for it who is not its prompt.
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
from mmengine.structured_output.request.fields import Normalizer, normalize_large_by

FORM_WORKERS = 2  # a large schema takes seconds: requests without one do not wait for it
TEXT_WORKERS = 2  # a long text does not keep short ones waiting
URL_WORKERS = 1  # finds the URLs of a prompt
STANDSTILL_S = 30.0  # a request that is prepared for longer keeps an engine from being ready


class Standing(NamedTuple):
    """Of the requests that are prepared: how many, and the age of the oldest in seconds. While media are
    fetched for one, and before, it does not age: hosts on the internet say nothing of this engine."""

    num_requests: int = 0
    oldest_s: float = 0.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no further work should be sent."""
        if self.oldest_s <= STANDSTILL_S:
            return ()
        return (
            f"the oldest of {self.num_requests} requests in preparation has been there for "
            f"{self.oldest_s:.0f} seconds",
        )


class Preparing:
    """One request on its way to the engine. `form`: makes the form of its answer; None for free text."""

    def __init__(
        self,
        channel: Channel,
        prompt: Prompt,
        form: Callable[[], ResponseFormat] | None,
        timeout_s: float,
    ) -> None:
        self.channel, self.prompt, self.form = channel, prompt, form
        self.media: PromptMedia | None = None  # what is fetched for it
        self.loaded: tuple[MediaInput, ...] | None = None  # older media of its session, when it has them
        self.waits_since = time.monotonic()
        self.timeout_s = timeout_s
        limits = [limit for limit in (channel.options.deadline_s, timeout_s) if limit]
        self.limit_s = min(limits) if limits else None
        self.attempt = Attempt(None if self.limit_s is None else channel.begun + self.limit_s)

    @property
    def standing_s(self) -> float:
        return time.monotonic() - self.waits_since

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it. The engine's thread may not have heard of that yet."""
        return self.channel.closed or self.attempt.is_over

    def check(self) -> None:
        if self.is_over:
            raise AttemptOver(GIVEN_UP)

    @property
    def options(self) -> Options:
        """With which it is submitted."""
        options = self.channel.options.after(self.channel.age_s)
        if options.place is None or self.loaded is None:
            return options
        return replace(options, place=replace(options.place, loaded=self.loaded))

    @property
    def is_late(self) -> bool:
        """Whether the deadline of the request has passed."""
        deadline_s = self.channel.options.deadline_s
        return bool(deadline_s) and self.channel.age_s >= deadline_s

    def too_slow(self) -> RequestFailed:
        return RequestFailed(
            f"the prompt was not prepared within {self.timeout_s:g} seconds (prepare_timeout_s); send fewer "
            "or smaller images, or try again later"
        )


class Preparation:
    """`engine`: the one that prompts are prepared for, asked anew each time. `done`: called on some thread
    with what became of a request, unless it was given up while it waited. `work_out`: what works large
    schemas out; None: the threads for forms."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        num_media_workers: int,
        done: Callable[[Preparing, Prepared | Exception], None],
        work_out: Normalizer | None = None,
    ) -> None:
        self._engine, self._done, self._work_out = engine, done, work_out
        self._forms = CancellableWorkers(FORM_WORKERS, "mmengine-form")
        self._texts = CancellableWorkers(TEXT_WORKERS, "mmengine-text")
        self._media = CancellableWorkers(num_media_workers, "mmengine-media")
        self._urls = CancellableWorkers(URL_WORKERS, "mmengine-urls")
        self._lanes = self._forms, self._texts, self._urls, self._media
        self._lock = threading.Lock()
        self._requests: dict[Preparing, None] = {}  # those that wait, and those that a thread works on
        self._fetching: set[Preparing] = set()  # those that others are waited for: hosts on the internet

    def begin(self, request: Preparing) -> None:
        with self._lock:
            self._requests[request] = None
        if request.form is not None:
            self._forms.put(request, partial(self._run_form, request, request.form))
        else:
            self._queue_prompt(request)

    def _queue_prompt(self, request: Preparing) -> None:
        if request.prompt.has_media and names_urls(request.prompt):
            self._urls.put(request, partial(self._fetch, request))
            return
        lane = self._media if request.prompt.has_media else self._texts
        lane.put(request, partial(self._run_prompt, request))

    def _fetch(self, request: Preparing) -> None:
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

    def _fetched(self, request: Preparing, media: PromptMedia) -> None:
        """On a thread of the door, or of the lane."""
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

    def _run_form(self, request: Preparing, form: Callable[[], ResponseFormat]) -> None:
        try:
            request.check()
            with request.attempt.on_this_thread(), normalize_large_by(self._work_out):
                made = form()
            self._settle(request.channel, made)
        except Exception as error:
            self._end(request, error)
        else:
            self._queue_prompt(request)

    def _settle(self, channel: Channel, form: ResponseFormat) -> None:
        """The channel holds the form from here on, until `release`."""
        if form.grammar is None:
            return
        options = form.added_to(channel.options)
        options.check()
        grammar = self._engine().grammar_memory.hold(channel, form.grammar)
        channel.options = replace(options, grammar=grammar)
        channel.texts.grammar = grammar

    def _run_prompt(self, request: Preparing) -> None:
        try:
            with request.attempt.on_this_thread():
                result: Prepared | Exception = self._prepared(request)
        except Exception as error:
            result = error
        finally:
            if request.media is not None:
                request.media.release()
        self._end(request, result)

    def _prepared(self, request: Preparing) -> Prepared:
        """The channel holds the pixels from here on, until `release`."""
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

    def load(self, request: Preparing, prepared: Prepared, loads: Sequence[Load]) -> None:
        """It was prepared, and older media of its session have to be decoded once more; `done` is called
        again."""
        with self._lock:
            self._requests[request] = None
            request.waits_since = time.monotonic()
        self._media.put(request, partial(self._run_loads, request, prepared, loads))

    def _run_loads(self, request: Preparing, prepared: Prepared, loads: Sequence[Load]) -> None:
        try:
            with request.attempt.on_this_thread():
                request.loaded = self._loaded(request, prepared, loads)
        except Exception as error:
            self._end(request, error)
        else:
            self._end(request, prepared)

    def _loaded(
        self, request: Preparing, prepared: Prepared, loads: Sequence[Load]
    ) -> tuple[MediaInput, ...]:
        """The first of them, for which there is room: of the others a step decodes each as it comes to it."""
        memory, channel = self._engine().media_memory, request.channel
        memory.release(channel)  # it waits for the room that others take, and not for its own
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

    def _end(self, request: Preparing, result: Prepared | Exception) -> None:
        self._forget(request)
        self._done(request, result)

    def _forget(self, request: Preparing) -> None:
        with self._lock:
            self._requests.pop(request, None)
            self._fetching.discard(request)

    def release(self, channel: Channel) -> None:
        """The engine has what was prepared, or nobody wants it."""
        self._engine().media_memory.release(channel)
        self._engine().grammar_memory.release(channel)

    def give_up(self, request: Preparing) -> None:
        """Nobody wants it any more: what waits is taken back, a process that decodes for it is ended."""
        request.attempt.give_up()
        if request.media is not None:
            request.media.release()
        if any(lane.drop(request) for lane in self._lanes):
            self._forget(request)

    def standing(self) -> Standing:
        with self._lock:
            oldest = next(iter(self._requests), None)
            number = len(self._requests) + len(self._fetching)
            return Standing(number, 0.0 if oldest is None else oldest.standing_s)

    def close(self) -> None:
        """Prepare what waits, and wait for it."""
        for lane in self._lanes:
            lane.close()

"""AsyncEngine's sessions: prompts to which many callers append content, and about which they ask questions.

Example:

    session = await engine.session(system="You watch a door.")
    await session.frame(picture, seconds)
    async with session.stream("Who came in?", max_tokens=64) as stream:
        async for output in stream:
            print(output.text, end="")
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, Unpack

from mmengine.core.executor import CUT
from mmengine.errors import ErrorCode, SessionBusy
from mmengine.request import PREFILL, SamplingParams
from mmengine.serve.async_engine.engine_thread import EngineThread
from mmengine.serve.engine.engine import Engine
from mmengine.serve.engine.session import Appended, Frames, as_parts, session_request
from mmengine.serve.prompt.options import FORM, Options, SessionOptions, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.sessions import SessionFacts, SessionSettings
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.request_output import CUT_AT_STOP, Completion, require_success
from mmengine.serve.text.response_format import ResponseFormat, response_format_of

MAX_WAITING = 16  # maximum number of requests that wait for a session's running request
_POLL_S = 0.02  # interval in seconds at which a waiting caller checks whether the earlier request has ended


class AsyncSessions:
    """Opens and lists AsyncEngine's sessions. `count` and `submit` are AsyncEngine's methods."""

    def __init__(
        self,
        thread: EngineThread,
        count: Callable[[Prompt], Awaitable[int]],
        submit: Callable[[Prompt, Options, Callable[[], ResponseFormat] | None, bool], Stream],
    ) -> None:
        self.thread, self.count, self.submit = thread, count, submit

    async def open(
        self,
        session_id: str,
        idle_s: float,
        media_options: Mapping[str, object] | None,
        options: SessionOptions,
    ) -> "AsyncSession":
        """Open a new session. Raises InvalidRequest, QueueFull."""
        settings = SessionSettings.of(options)

        def opened(engine: Engine) -> str:
            engine.pooled.check_chats()
            return engine.sessions.open(session_id, settings, idle_s)

        name = await self.thread.call(opened)
        return self.attach(name, media_options)

    def attach(self, session_id: str, media_options: Mapping[str, object] | None) -> "AsyncSession":
        """Return the session with this id. If the session is closed, its methods raise InvalidRequest."""
        return AsyncSession(self, session_id, media_options)

    async def facts(self) -> list[SessionFacts]:
        """Return each open session's state."""
        return await self.thread.call(
            lambda engine: [engine.sessions.facts(name) for name in engine.sessions.names()]
        )


class AnswerFacts(NamedTuple):
    """How a session's answer ended. `number`: the session's request count before the question."""

    number: int
    reason: str
    detail: str
    num_embeds: dict[str, int] = {}
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    code: ErrorCode | None = None


class AsyncSession:
    """A session whose requests run one after the other, in call order. At most MAX_WAITING requests wait.

    `media_options` apply to all media in the session, with the same meaning as in Prompt.
    """

    def __init__(
        self, sessions: AsyncSessions, session_id: str, media_options: Mapping[str, object] | None = None
    ):
        self._sessions, self.session_id, self._media_options = sessions, session_id, media_options
        self._thread = sessions.thread
        self._turns = asyncio.Lock()
        self._num_waiting = 0
        self._frames = Frames(getattr(self._thread.engine.processor, "frames_in_patch", 1))
        self.last_answer: AnswerFacts | None = None  # the last answer that was read in this process

    async def facts(self) -> SessionFacts:
        """Return the session's state.

        Raises InvalidRequest if the session is closed, for example because it was idle.
        """
        facts = await self._thread.call(lambda engine: engine.sessions.facts(self.session_id))
        self._frames.settle(facts.num_requests)
        return facts

    @property
    def num_frames_held(self) -> int:
        """How many frames wait until their temporal patch is complete. Calling `facts` updates the count."""
        return len(self._frames.held)

    @property
    def num_bytes_held(self) -> int:
        """The waiting frames' total encoded size in bytes."""
        return self._frames.num_bytes

    @property
    def next_frame_waits(self) -> bool:
        """Whether the next frame would wait for later frames in its patch. Read this only within a `turn`."""
        return not self._frames.is_almost_whole

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[SessionFacts]:
        """Wait for this caller's turn and yield the session's state.

        During the turn no other caller's request runs, and the session does not count as idle. Raises
        SessionBusy if too many requests wait.
        """
        if self._num_waiting > MAX_WAITING:
            raise SessionBusy(
                f"{MAX_WAITING} requests of session {self.session_id!r} already wait; send the next request "
                "when one of these was answered"
            )
        self._num_waiting += 1
        self._thread.put(lambda: self._thread.engine.sessions.begin_turn(self.session_id))
        try:
            async with self._turns:
                while (facts := await self.facts()).live:
                    await asyncio.sleep(_POLL_S)
                yield facts
        finally:
            self._thread.put(lambda: self._thread.engine.sessions.end_turn(self.session_id))
            self._num_waiting -= 1

    async def append(self, content: object, *, anchor: bool = False) -> Appended:
        """Append content as `Session.append` does."""
        async with self.turn() as facts:
            return await self.append_in_turn(facts, content, anchor=anchor)

    async def append_in_turn(self, facts: SessionFacts, content: object, *, anchor: bool = False) -> Appended:
        """Append content within a `turn`."""
        content = [*self._frames.rest(facts.num_requests), *as_parts(content)]
        return await self._computed(facts, content, is_anchor=anchor)

    async def frame(self, image: object, seconds: float) -> Appended | None:
        """Append a frame as `Session.frame` does."""
        async with self.turn() as facts:
            return await self.frame_in_turn(facts, image, seconds)

    async def frame_in_turn(
        self, facts: SessionFacts, image: object, seconds: float, index: int | None = None
    ) -> Appended | None:
        """Append a frame within a `turn`. `index`: the sender's frame number, with which `has_frame` finds a
        repeated frame.
        """
        is_film = self._frames.are_read_together
        if parts := self._frames.add(facts.num_requests, image, seconds, index):
            return await self._computed(facts, parts, is_film=is_film)
        with self._frames.preview() as parts:
            await self._sessions.count(self._placed(facts, parts, is_film=is_film)[0])
        return None

    def has_frame(self, image: object, seconds: float, index: int | None) -> bool:
        """Return whether an equal frame with the same index already waits for further frames.

        Call this method only within a `turn`.
        """
        return self._frames.holds(image, seconds, index)

    def _placed(
        self, facts: SessionFacts, content: object, *, is_anchor: bool = False, is_film: bool = False
    ) -> tuple[Prompt, Options]:
        sessions, options = self._thread.engine.sessions, Options(PREFILL)
        return session_request(
            *(sessions, facts, content, options, False, is_anchor, self._media_options), is_film=is_film
        )

    async def _computed(
        self, facts: SessionFacts, content: object, *, is_anchor: bool = False, is_film: bool = False
    ) -> Appended:
        prompt, request_options = self._placed(facts, content, is_anchor=is_anchor, is_film=is_film)
        async with self._sessions.submit(prompt, request_options, None, False) as stream:
            done = require_success(await stream.completed())
        self._frames.settle(facts.num_requests + 1)
        return Appended(len(done.prompt_token_ids), done.num_cached_tokens)

    @asynccontextmanager
    async def stream(
        self,
        question: object,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> AsyncIterator[Stream]:
        """Ask a question as `Session.ask` does, and yield the answer's stream.

        `hold` has the same meaning as for `AsyncEngine.stream`.

        Leaving the `async with` block before the answer ends removes the question from the session.
        """
        async with (
            self.turn() as facts,
            self.stream_in_turn(facts, question, sampling, hold=hold, **options) as stream,
        ):
            yield stream
            self.note_answer(facts, stream)

    def stream_in_turn(
        self,
        facts: SessionFacts,
        question: object,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream:
        """Ask a question within a `turn`."""
        content = [*self._frames.rest(facts.num_requests), *as_parts(question)]
        has_form = any(options.get(name) is not None for name in FORM)
        form = partial(response_format_of, options) if has_form else None
        given = make_options(sampling, options)
        sessions = self._thread.engine.sessions
        prompt, request_options = session_request(
            sessions, facts, content, given, True, False, self._media_options
        )
        return self._sessions.submit(prompt, request_options, form, hold)

    def note_answer(self, facts: SessionFacts, stream: Stream) -> None:
        """Record how the answer ended. Call this after reading the last output from `stream_in_turn`."""
        done = stream.completion
        if done is None or done.error() is not None:
            return
        self._frames.settle(facts.num_requests + 1)
        detail = CUT if done.choices[0].detail == CUT_AT_STOP else done.choices[0].detail
        counts = done.num_cached_tokens, done.num_drafts, done.num_accepted
        self.last_answer = AnswerFacts(
            facts.num_requests, done.finish_reason, detail, dict(stream.num_embeds), *counts
        )

    async def ask(
        self, question: object, sampling: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> Completion:
        """Ask a question and return the answer, as `Session.ask` does."""
        async with self.stream(question, sampling, **options) as stream:
            return require_success(await stream.completed())

    async def close(self) -> None:
        """Close the session and release its KV blocks and images, even while a request runs.

        Closing a closed session is no error.
        """

        def close(engine: Engine) -> None:
            if self.session_id in engine.sessions.names():
                engine.sessions.close(self.session_id)

        await self._thread.call(close)

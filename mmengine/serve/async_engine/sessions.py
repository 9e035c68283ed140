"""Sessions of an AsyncEngine: many callers, each session's requests one behind the other.

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
from mmengine.serve.engine.session import Appended, Frames, listed, placed
from mmengine.serve.prompt.options import FORM, Options, SessionOptions, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.sessions import SessionFacts, SessionSettings
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.request_output import CUT_AT_STOP, Completion, require_success
from mmengine.serve.text.response_format import ResponseFormat, response_format_of

MAX_WAITING = 16  # requests of one session that wait behind the one on its way; one more is refused
_POLL_S = 0.02  # how soon it is seen that a request of the process before, or one that was left, is over


class AsyncSessions:
    """The sessions of an AsyncEngine. `count` and `submit` are those of the engine."""

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
        name = await self.thread.call(lambda engine: engine.sessions.open(session_id, settings, idle_s))
        return self.attach(name, media_options)

    def attach(self, session_id: str, media_options: Mapping[str, object] | None) -> "AsyncSession":
        """Return an open session; its methods raise InvalidRequest if it is not open."""
        return AsyncSession(self, session_id, media_options)

    async def facts(self) -> list[SessionFacts]:
        """Return the facts of all open sessions."""
        return await self.thread.call(
            lambda engine: [engine.sessions.facts(name) for name in engine.sessions.names()]
        )


class Ended(NamedTuple):
    """How the answer to a session's request with this number ended, beside its tokens, which the session
    has."""

    number: int
    reason: str
    detail: str
    num_embeds: dict[str, int] = {}
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    code: ErrorCode | None = None


class AsyncSession:
    """One session. Its requests go one behind the other, in the order in which they were called; MAX_WAITING
    wait at most. `media_options`: of all media, as those of a Prompt."""

    def __init__(
        self, sessions: AsyncSessions, session_id: str, media_options: Mapping[str, object] | None = None
    ):
        self._sessions, self.session_id, self._media_options = sessions, session_id, media_options
        self._thread = sessions.thread
        self._turns = asyncio.Lock()
        self._num_waiting = 0
        self._frames = Frames(getattr(self._thread.engine.processor, "frames_in_patch", 1))
        self.ended: Ended | None = None  # of the last answer that somebody here `heard`

    async def facts(self) -> SessionFacts:
        """Raises InvalidRequest when it was closed, or nobody asked for too long."""
        facts = await self._thread.call(lambda engine: engine.sessions.facts(self.session_id))
        self._frames.settle(facts.num_requests)
        return facts

    @property
    def num_frames_held(self) -> int:
        """Frames that wait for others that the encoder reads together with them, by the last `facts`."""
        return len(self._frames.held)

    @property
    def num_bytes_held(self) -> int:
        """Of the encoded ones among them."""
        return self._frames.num_bytes

    @property
    def next_frame_waits(self) -> bool:
        """Within a `turn`: whether it would, for others behind it."""
        return not self._frames.is_almost_whole

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[SessionFacts]:
        """It is this caller's turn; gives what the session is, which is not idle until it is over. Raises
        SessionBusy where too many wait."""
        if self._num_waiting > MAX_WAITING:
            raise SessionBusy(
                f"{MAX_WAITING} requests of session {self.session_id!r} wait already; send the next one when "
                "one of them was answered"
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
        """See Session."""
        async with self.turn() as facts:
            return await self.appended(facts, content, anchor=anchor)

    async def appended(self, facts: SessionFacts, content: object, *, anchor: bool = False) -> Appended:
        """`append` within a `turn`."""
        content = [*self._frames.rest(facts.num_requests), *listed(content)]
        return await self._computed(facts, content, is_anchor=anchor)

    async def frame(self, image: object, seconds: float) -> Appended | None:
        """See Session."""
        async with self.turn() as facts:
            return await self.framed(facts, image, seconds)

    async def framed(
        self, facts: SessionFacts, image: object, seconds: float, index: int | None = None
    ) -> Appended | None:
        """`frame` within a `turn`. `index`: with which its sender counts it, see `holds`."""
        is_film = self._frames.are_read_together
        if parts := self._frames.add(facts.num_requests, image, seconds, index):
            return await self._computed(facts, parts, is_film=is_film)
        with self._frames.looked_at() as parts:
            await self._sessions.count(self._placed(facts, parts, is_film=is_film)[0])
        return None

    def holds(self, image: object, seconds: float, index: int | None) -> bool:
        """Within a `turn`: whether this frame came before with the same index, and waits for others."""
        return self._frames.holds(image, seconds, index)

    def _placed(
        self, facts: SessionFacts, content: object, *, is_anchor: bool = False, is_film: bool = False
    ) -> tuple[Prompt, Options]:
        sessions, options = self._thread.engine.sessions, Options(PREFILL)
        return placed(
            *(sessions, facts, content, options, False, is_anchor, self._media_options), is_film=is_film
        )

    async def _computed(
        self, facts: SessionFacts, content: object, *, is_anchor: bool = False, is_film: bool = False
    ) -> Appended:
        prompt, asked = self._placed(facts, content, is_anchor=is_anchor, is_film=is_film)
        async with self._sessions.submit(prompt, asked, None, False) as stream:
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
        """Ask, see Session, and read the answer as it comes. `hold` as for `AsyncEngine.stream`. Who leaves
        before its end takes the question back."""
        async with (
            self.turn() as facts,
            self.asked(facts, question, sampling, hold=hold, **options) as stream,
        ):
            yield stream
            self.heard(facts, stream)

    def asked(
        self,
        facts: SessionFacts,
        question: object,
        sampling: SamplingParams | None = None,
        *,
        hold: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> Stream:
        """`stream` within a `turn`."""
        content = [*self._frames.rest(facts.num_requests), *listed(question)]
        has_form = any(options.get(name) is not None for name in FORM)
        form = partial(response_format_of, options) if has_form else None
        given = make_options(sampling, options)
        sessions = self._thread.engine.sessions
        prompt, asked = placed(sessions, facts, content, given, True, False, self._media_options)
        return self._sessions.submit(prompt, asked, form, hold)

    def heard(self, facts: SessionFacts, stream: Stream) -> None:
        """Nobody reads any more of what was `asked` within a `turn`."""
        done = stream.completion
        if done is None or done.error() is not None:
            return
        self._frames.settle(facts.num_requests + 1)
        detail = CUT if done.choices[0].detail == CUT_AT_STOP else done.choices[0].detail
        counts = done.num_cached_tokens, done.num_drafts, done.num_accepted
        self.ended = Ended(facts.num_requests, done.finish_reason, detail, dict(stream.num_embeds), *counts)

    async def ask(
        self, question: object, sampling: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> Completion:
        """See Session."""
        async with self.stream(question, sampling, **options) as stream:
            return require_success(await stream.completed())

    async def close(self) -> None:
        """Let its blocks and images go, also while a request of it is on its way. Closing one that is closed
        is no error."""

        def close(engine: Engine) -> None:
            if self.session_id in engine.sessions.names():
                engine.sessions.close(self.session_id)

        await self._thread.call(close)

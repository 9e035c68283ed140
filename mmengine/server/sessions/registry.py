"""Open sessions: their owners, and the part of each session that only this process holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

from mmengine.config import EngineConfig
from mmengine.errors import ErrorCode, FieldPath, InvalidRequest, MMEngineError, QueueFull
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.async_engine.sessions import AsyncSession
from mmengine.serve.requests.sessions import SessionFacts
from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.submission import log_request_id
from mmengine.server.http.admission import Admission
from mmengine.server.http.errors import ApiError
from mmengine.server.sessions.bodies import StoredSession, stored_session_of
from mmengine.server.settings import ServerSettings

FORGET_EVERY_S = 5.0  # seconds until the memory of a session that ended by itself is released


class SessionRegistry:
    """An engine's sessions. `opened`: media options that all sessions get in addition to their own."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        config: EngineConfig,
        admission: Admission,
        opened: Json,
    ):
        self.engine, self._settings, self._config = engine, settings, config
        self._admission, self._opened = admission, opened
        self._open: dict[str, AsyncSession] = {}  # by id in the log
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # locks of the keys that are opening a session

    @classmethod
    def of_engine(
        cls, engine: ServedEngine, settings: ServerSettings, admission: Admission, opened: Json
    ) -> "SessionRegistry | None":
        """Return None when requests go to several engines, which keep no sessions."""
        if not isinstance(engine, AsyncEngine):
            return None
        return cls(engine, settings, engine.config, admission, opened)

    def add(self, session: AsyncSession) -> None:
        self._open[session.session_id] = session

    async def close(self, session: AsyncSession) -> None:
        try:
            await session.close()
        finally:
            self._open.pop(session.session_id, None)

    async def found(self, owner: str, name: str) -> tuple[AsyncSession, str]:
        """Return the session and its adapter's name. Raises ApiError if this key has no such session."""
        session_id = log_request_id(owner, name)
        try:
            facts = await self.engine.attach_session(session_id).facts()
        except InvalidRequest:
            self._open.pop(session_id, None)
            raise _unknown(name) from None
        kept = stored_session_of(facts)
        if kept.owner != owner:
            raise _unknown(name)
        if session_id not in self._open:  # the last process opened it
            self._open[session_id] = self.engine.attach_session(session_id, self.media_options(kept))
        return self._open[session_id], facts.settings.adapter

    async def of(self, owner: str) -> list[SessionFacts]:
        """Return the sessions of a key."""
        return [facts for facts in await self.engine.sessions() if stored_session_of(facts).owner == owner]

    def media_options(self, kept: StoredSession) -> Json:
        return {**kept.media, **self._opened}

    @asynccontextmanager
    async def opening(self, owner: str) -> AsyncIterator[None]:
        """Guard the opening of a session.

        With several keys, each key opens one session at a time, so that the next opening counts it. Raises
        ApiError when the key would exceed its share.
        """
        if not self._admission.has_several_keys:
            yield
            return
        most = max(1, int(self._config.max_sessions * self._settings.key_share))
        async with self._turns.setdefault(owner, asyncio.Lock()):
            if len(await self.of(owner)) >= most:
                text = f"this API key has {most} open sessions, its share (key_share); close one"
                raise ApiError(ErrorCode.KEY_SHARE_FULL, text, headers={"retry-after": "5"})
            yield

    def check_room(self, owner: str, session: AsyncSession, image: str) -> None:
        """Check the memory for a frame that waits for the frames after it. Raises QueueFull, and ApiError
        when the key would exceed its share.
        """
        if not session.next_frame_waits:
            return
        most = max(self._config.session_media_bytes, self._settings.max_body_bytes)
        own, count = log_request_id(owner, ""), len(image)
        held = {name: each.num_bytes_held for name, each in self._open.items()}
        if (total := sum(held.values())) + count > most:
            raise QueueFull(
                f"waiting frames hold {total} of {most} bytes (session_media_bytes); send the frames that "
                "complete them, or close their sessions"
            )
        mine, share = sum(held[name] for name in held if name.startswith(own)), self._settings.key_share
        if self._admission.has_several_keys and mine and mine + count > most * share:
            text = f"this API key's waiting frames hold {mine} bytes, its share (key_share)"
            raise ApiError(ErrorCode.KEY_SHARE_FULL, text, headers={"retry-after": "5"})

    async def watch(self) -> None:
        """Release the memory of sessions that were idle for too long, until cancelled."""
        while True:
            await asyncio.sleep(FORGET_EVERY_S)
            with suppress(MMEngineError):  # the engine ends, and all sessions with it
                await self._forget_ended()

    async def _forget_ended(self) -> None:
        known = set(self._open)  # without sessions that open meanwhile
        if known:
            names = await self.engine.on_engine(lambda engine: engine.sessions.names())
            for session_id in known.difference(names):
                self._open.pop(session_id, None)


def _unknown(name: str) -> ApiError:
    text = f"there is no session {name[:200]!r}; it may have been closed or idle for too long"
    return ApiError(ErrorCode.SESSION_NOT_FOUND, text, FieldPath("session_id"))

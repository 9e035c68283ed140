"""The open sessions, their owners, and the session state that is not in the log, such as waiting video
frames.
"""

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

FORGET_EVERY_S = 5.0  # Seconds between two checks for sessions that the engine has closed.


class SessionRegistry:
    """An engine's sessions. `opened`: media options for all sessions, which override the session's own
    options.
    """

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
        self._open: dict[str, AsyncSession] = {}  # Maps an id in the log to the session.
        # Maps an owner to a lock for opening sessions.
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    @classmethod
    def of_engine(
        cls, engine: ServedEngine, settings: ServerSettings, admission: Admission, opened: Json
    ) -> "SessionRegistry | None":
        """Return the registry, or None if `engine` has several replicas: sessions require a single engine."""
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
        """Return the owner's session `name`, and its adapter's name. Raises ApiError if the owner has no such
        session.
        """
        session_id = log_request_id(owner, name)
        try:
            facts = await self.engine.attach_session(session_id).facts()
        except InvalidRequest:
            self._open.pop(session_id, None)
            raise _unknown(name) from None
        kept = stored_session_of(facts)
        if kept.owner != owner:
            raise _unknown(name)
        if session_id not in self._open:  # A previous process opened the session.
            self._open[session_id] = self.engine.attach_session(session_id, self.media_options(kept))
        return self._open[session_id], facts.settings.adapter

    async def of(self, owner: str) -> list[SessionFacts]:
        """Return an owner's sessions."""
        return [facts for facts in await self.engine.sessions() if stored_session_of(facts).owner == owner]

    async def keep_tenants(self) -> None:
        """Restore each owner's tenant from the previous process's sessions."""
        with suppress(MMEngineError):  # The engine has ended.
            found = await self.engine.sessions()
            self._admission.keep_tenants((facts.session_id, facts.settings.tenant) for facts in found)

    def media_options(self, kept: StoredSession) -> Json:
        return {**kept.media, **self._opened}

    @asynccontextmanager
    async def opening(self, owner: str) -> AsyncIterator[None]:
        """Guard the opening of a session.

        If several API keys exist, each key opens one session at a time. Raises ApiError if the key already
        has its share of sessions.
        """
        if not self._admission.has_several_keys:
            yield
            return
        most = max(1, int(self._config.max_sessions * self._settings.key_share))
        async with self._turns.setdefault(owner, asyncio.Lock()):
            if len(await self.of(owner)) >= most:
                text = (
                    f"this API key has {most} open sessions, which is its share (key_share); close a session"
                )
                raise ApiError(ErrorCode.KEY_SHARE_FULL, text, headers={"retry-after": "5"})
            yield

    def check_room(self, owner: str, session: AsyncSession, image: str) -> None:
        """If the frame `image` must wait for further frames, check the memory for waiting frames. Raises
        QueueFull if the memory is full, and ApiError if the owner would exceed its share.
        """
        if not session.next_frame_waits:
            return
        most = max(self._config.session_media_bytes, self._settings.max_body_bytes)
        own, count = log_request_id(owner, ""), len(image)
        held = {name: each.num_bytes_held for name, each in self._open.items()}
        if (total := sum(held.values())) + count > most:
            raise QueueFull(
                f"waiting frames hold {total} of {most} bytes (session_media_bytes); send the frames that "
                "they wait for, or close their sessions"
            )
        mine, share = sum(held[name] for name in held if name.startswith(own)), self._settings.key_share
        if self._admission.has_several_keys and mine and mine + count > most * share:
            text = (
                f"this API key's waiting frames hold {mine} bytes; {count} more exceed its share (key_share)"
            )
            raise ApiError(ErrorCode.KEY_SHARE_FULL, text, headers={"retry-after": "5"})

    async def watch(self) -> None:
        """Forget sessions that the engine has closed, for example idle sessions. Runs until cancelled."""
        while True:
            await asyncio.sleep(FORGET_EVERY_S)
            with suppress(MMEngineError):  # The engine has ended.
                await self._forget_ended()

    async def _forget_ended(self) -> None:
        known = set(self._open)  # A copy: sessions may open during the next call.
        if known:
            names = await self.engine.on_engine(lambda engine: engine.sessions.names())
            for session_id in known.difference(names):
                self._open.pop(session_id, None)


def _unknown(name: str) -> ApiError:
    text = f"there is no session {name[:200]!r}; it may have been closed or idle for too long"
    return ApiError(ErrorCode.SESSION_NOT_FOUND, text, FieldPath("session_id"))

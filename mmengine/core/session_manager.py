"""Manages sessions: conversations that keep their KV blocks between requests.

Each method checks its call and puts an event into the engine's inbox.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.decide.request_checks import check_request, check_session
from mmengine.core.inbox import Inbox
from mmengine.core.observer import Observer
from mmengine.core.state.sessions import SessionState
from mmengine.core.state.state import State
from mmengine.errors import ErrorCode, FieldPath, InvalidRequest, QueueFull, SessionBusy
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem, Request, num_before


class SessionManager(Observer):
    """The sessions of an EngineCore. Not thread-safe.

    `accepted`: checks a request and returns its QUEUED event. Raises the errors of `EngineCore.submit`.
    """

    def __init__(
        self,
        config: EngineConfig,
        state: State,
        inbox: Inbox,
        accepted: Callable[[Request], ev.Queued],
    ):
        self._config, self._state, self._inbox, self._accepted = config, state, inbox, accepted
        self._held: Counter[str] = Counter()  # session id -> number of callers that hold the session

    def open(self, event: ev.SessionOpened) -> None:
        """Open a session. Raises InvalidRequest if the session is invalid or its id is in use, and QueueFull
        if `max_sessions` sessions are open."""
        check_session(event, self._config)
        name, inbox = event.session_id, self._inbox
        if name in self._state.sessions.all or name in inbox.opening:
            text = f"the session id {name!r} is in use; choose another"
            raise InvalidRequest(text, path=FieldPath("session_id"))
        if len(self._state.sessions) + len(inbox.opening) >= self._config.max_sessions:
            raise QueueFull(
                f"{self._config.max_sessions} sessions are open already (max_sessions); close one, or try "
                "again later"
            )
        inbox.put(event)

    def append(
        self,
        session_id: str,
        request: Request,
        *,
        num_kept: int | None = None,
        num_opening: int = 0,
        is_anchor: bool = False,
        film: int = 0,
    ) -> None:
        """Submit a request whose prompt and media contain the whole conversation so far.

        The session keeps the longest prefix that it shares with the prompt (at most `num_kept` tokens) and
        forgets the rest. The answer is added to the session. `num_opening`, `is_anchor` and `film` are fields
        of the APPENDED event. Raises the errors of `EngineCore.submit`, InvalidRequest for an unknown
        session, and SessionBusy while the session has a running request.
        """
        session = self.find(session_id)
        if session.live or session_id in self._inbox.appending:
            text = f"a request of session {session_id!r} is running; wait for its answer"
            raise SessionBusy(text, path=FieldPath("session_id"))
        check_request(request, self._config, max_media=self._config.max_media_per_session)
        alike = _num_shared(session, request)
        num_kept = alike if num_kept is None else min(alike, num_kept)
        prompt, media = _own_part(request, num_kept)
        own = self._accepted(replace(request, prompt_token_ids=prompt, media=media, cache_salt=""))
        place = num_kept, num_opening, is_anchor, film
        self._inbox.put(ev.Appended(session_id, request.request_id, *place))
        self._inbox.put(own)

    def find(self, session_id: str) -> SessionState:
        """Return an open session. Raises InvalidRequest if no open session has this id."""
        session = self._state.sessions.all.get(session_id)
        if session is None and session_id in self._inbox.opening:
            opened = self._inbox.opening[session_id]
            session = SessionState(session_id, opened.cache_salt, opened.idle_ns, opened.envelope)
        if session is None or session_id in self._inbox.closing:
            text = f"no session {session_id!r} is open; it was closed or never opened"
            raise InvalidRequest(text, code=ErrorCode.SESSION_NOT_FOUND, path=FieldPath("session_id"))
        return session

    def close(self, session_id: str, reason: str) -> None:
        """Close a session and cancel its running request. Raises InvalidRequest if no open session has this
        id.
        """
        session = self.find(session_id)
        if session.live:
            self._inbox.put(ev.Cancelled(session.live, "its session was closed"))
        self._inbox.put(ev.SessionClosed(session_id, reason))

    def hold(self, session_id: str) -> None:
        """Exempt the session from the idle timeout until `release` is called."""
        self._held[session_id] += 1
        self._inbox.forget_session(session_id)

    def release(self, session_id: str) -> None:
        """End a `hold`. The idle time starts if no request is running and no other caller holds the session.
        Does nothing for a closed session.
        """
        self._held -= Counter((session_id,))
        session = self._state.sessions.all.get(session_id)
        if session is not None and not session.live and session_id not in self._inbox.appending:
            self._expect(session_id, session.idle_ns)

    def hold_sessions_of(self, other: "SessionManager") -> None:
        """Hold all sessions that `other` holds. Called when this engine core replaces the other core."""
        for session_id in other._held.elements():
            self.hold(session_id)

    def _expect(self, session_id: str, idle_ns: int) -> None:
        if session_id not in self._held:
            self._inbox.expect_session(session_id, idle_ns)

    def before(self, event: ev.Event) -> None:
        """Start a session's idle time when the session opens or its request ends. The next request's arrival
        stops the idle time.
        """
        match event:
            case ev.SessionOpened(session_id=name, idle_ns=idle_ns):
                self._expect(name, idle_ns)
            case ev.Appended(session_id=name) | ev.SessionClosed(session_id=name):
                self._inbox.forget_session(name)
            case ev.Finished(request_id=name):
                session = self._state.sessions.of_request.get(name)
                if session is not None:
                    self._expect(session.session_id, session.idle_ns)

    def recovered(self) -> None:
        """Start the idle time of all sessions without a running request, after a log was resumed."""
        for session in self._state.sessions.all.values():
            if not session.live:
                self._expect(session.session_id, session.idle_ns)


def _own_part(request: Request, num_kept: int) -> tuple[np.ndarray, tuple[MediaItem, ...]]:
    """Return the prompt tokens and the media after the first `num_kept` tokens. Media positions become
    relative to token `num_kept`.
    """
    media = []
    for item in request.media:
        if item.start >= num_kept:
            media.append(item.moved(-num_kept))
    return request.prompt_token_ids[num_kept:], tuple(media)


def _num_shared(session: SessionState, request: Request) -> int:
    """Return the length of the longest prefix that the session and the request share.

    The prefix never splits a media item, and is shorter than the prompt.
    """
    tokens = request.prompt_token_ids
    count = min(len(session.tokens), len(tokens) - 1)
    differ = np.flatnonzero(session.tokens[:count] != tokens[:count])
    num_shared = int(differ[0]) if len(differ) else count
    pairs = zip(session.media, request.media, strict=False)
    number = next((n for n, (mine, its) in enumerate(pairs) if mine != its), None)
    if number is None:
        number = min(len(session.media), len(request.media))
    following = (*session.media[number : number + 1], *request.media[number : number + 1])
    num_shared = min([num_shared, *(item.start for item in following)])
    cut = request.media[num_before(request.media, num_shared) : number][:1]
    return min([num_shared, *(item.start for item in cut)])

"""Applies events about sessions. The events change a session's tokens and its lease, the blocks that the
session protects from eviction.
"""

import msgspec
import numpy as np

from mmengine.core.state.request_state import RequestState
from mmengine.core.state.sessions import NO_BLOCKS, Chunk, Place, SessionState
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.request import num_before


def apply_opened(state: State, event: ev.SessionOpened) -> None:
    state.sessions.add(SessionState(event.session_id, event.cache_salt, event.idle_ns, event.envelope))


def apply_appended(state: State, event: ev.Appended) -> None:
    session = state.sessions.all[event.session_id]
    num_kept = max(0, min(event.num_kept, len(session.tokens)))
    cut = session.media[num_before(session.media, num_kept) :][:1]
    num_kept = min([num_kept, *(item.start for item in cut)])
    state.sessions.begin(
        session, event.request_id, Place(num_kept, event.num_opening, event.is_anchor, event.film)
    )


def with_session_prefix(state: State, queued: ev.Queued) -> ev.Queued:
    """Return the event with a longer prompt: the session's kept tokens and media, then the request's own
    prompt and media. If the request belongs to no session, return the event unchanged.
    """
    session = state.sessions.of_request.get(queued.request_id)
    if session is None:
        return queued
    num_kept = session.place.num_kept
    media = tuple(item.moved(num_kept) for item in queued.media)
    return msgspec.structs.replace(
        queued,
        prompt=session.tokens[:num_kept].tobytes() + queued.prompt,
        media=(*session.before(num_kept), *media),
        cache_salt=session.cache_salt,
    )


def grow(state: State, req_state: RequestState, reason: str) -> None:
    """Add a request's prompt and answer to its session, if the request ended with the reason "stop" or
    "length". Call this function before the request leaves its row.
    """
    session = state.sessions.end(req_state.request.request_id)
    if session is None or reason not in ev.ANSWERED:
        return
    tokens = state.known_tokens(req_state)
    place, num_outputs = session.place, len(tokens) - req_state.num_prompt
    before = tuple(chunk for chunk in session.chunks if chunk.start < place.num_kept)
    chunk = Chunk(place.num_kept, num_outputs, place.num_opening, place.is_anchor, place.film)
    session.tokens, session.media = tokens.copy(), req_state.request.media
    session.chunks, session.num_grown = (*before, chunk), session.num_grown + 1


def apply_leased(state: State, event: ev.Leased) -> None:
    session = state.sessions.all[event.session_id]
    new = np.frombuffer(event.blocks, np.int32)
    if len(new):
        state.blocks.share(new)
    _shorten_lease(state, session, event.num_kept)
    session.leased = np.concatenate((session.leased, new))
    state.sessions.clock += 1
    session.used, session.is_settled = state.sessions.clock, True


def apply_lease_taken(state: State, event: ev.LeaseTaken) -> None:
    _shorten_lease(state, state.sessions.all[event.session_id], event.num_kept)


def apply_closed(state: State, event: ev.SessionClosed) -> None:
    _shorten_lease(state, state.sessions.remove(event.session_id), 0)


def end_leases(state: State) -> None:
    """End all leases, because the prefix cache is about to be cleared."""
    for session in state.sessions.all.values():
        _shorten_lease(state, session, 0)


def _shorten_lease(state: State, session: SessionState, num_kept: int) -> None:
    gone = session.leased[num_kept:]
    session.leased = session.leased[:num_kept] if num_kept else NO_BLOCKS
    if len(gone):
        state.blocks.release(gone)

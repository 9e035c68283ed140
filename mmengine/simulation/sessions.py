"""Handles a workload's session requests: delays each request until its session is idle, and prepends the
session's tokens to the prompt.
"""

from collections import deque
from dataclasses import replace

import numpy as np

from mmengine.core.engine import EngineCore
from mmengine.core.state.sessions import NO_REQUEST
from mmengine.events.vocabulary import SessionOpened
from mmengine.request import Request
from mmengine.simulation.workload import SimRequest


class SessionQueues:
    """Holds back each request until its session's previous request has ended."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[SimRequest]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, request: SimRequest) -> None:
        self._queues.setdefault(request.session, deque()).append(request)

    def due(self, core: EngineCore) -> list[SimRequest]:
        """Remove and return the next request of each session that has no running request."""
        found = []
        for name in list(self._queues):
            session = core.state.sessions.all.get(name)
            if session is None or session.live == NO_REQUEST:
                found.append(self._queues[name].popleft())
            if not self._queues[name]:
                del self._queues[name]
        return found

    def left(self) -> list[str]:
        """Remove all waiting requests and return their ids."""
        names = [request.request_id for queue in self._queues.values() for request in queue]
        self._queues.clear()
        return names


def whole_request(core: EngineCore, sim: SimRequest) -> Request:
    """Return the request with its session's tokens and media in front. Opens the session if necessary."""
    name, sessions = sim.session, core.state.sessions.all
    if name not in sessions and name not in core.inbox.opening:
        core.sessions.open(SessionOpened(name))
    session, own = core.sessions.find(name), sim.request()
    before = len(session.tokens)
    media = (item.moved(before) for item in own.media)
    tokens = np.concatenate((session.tokens, own.prompt_token_ids))
    return replace(own, prompt_token_ids=tokens, media=(*session.media, *media))

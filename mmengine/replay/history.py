"""Checks a run's history: each request must end once, and each token must be delivered once, in order.
invariants.py checks single states instead.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from mmengine.core.outputs import Output
from mmengine.core.state.columns import LEFT
from mmengine.core.state.request_state import NO_ROW
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev

REQUESTS, ANSWERS, DELIVERIES = "requests", "answers", "deliveries"
DESCRIPTIONS = {
    REQUESTS: "Check that each request is live from its arrival to its only end.",
    ANSWERS: "Check that a request's answer grows by exactly the tokens that its steps gave, and a session "
    "by its request's tokens.",
    DELIVERIES: "Check that the engine's outputs have every token and every end once, and that an answer is "
    "delivered after its end.",
}


class _Pending:
    """A live request's undelivered tokens and finish reason."""

    __slots__ = ("end", "tokens")

    def __init__(self) -> None:
        self.tokens: deque[int] = deque()
        self.end: str | None = None


class History:
    """Checks the invariants of a run's history, event by event.

    `state`: the state before the next event. `names`: the invariants to check. `has_outputs`: whether the
    caller calls `outputs` after each call of the engine. `begins`: whether the run begins with the log's
    first record. `broken`: name and text of the first broken invariant, or None.
    """

    def __init__(self, state: State, names: Iterable[str], *, has_outputs: bool = True, begins: bool = True):
        self._state, self._names = state, frozenset(names)
        self._has_outputs, self._begins = has_outputs, begins
        self._lengths = {name: _length(state, name) for name in state.requests}
        self._ended: set[str] = set()  # Ended requests with undelivered tokens.
        self._grown: list[str] = []  # Requests that got tokens from the last event.
        # (Session id, tokens that the session must have after the last event), or None for no check.
        self._chunk: tuple[str, np.ndarray] | None = None
        self._moved = True  # Whether the last event changed the set of requests.
        self._pending: dict[str, _Pending] = {}
        self.broken: tuple[str, str] | None = None

    def before(self, event: ev.Event) -> None:
        """Check the state after the last event, and prepare the check of `event`. Call before `event` is
        applied.
        """
        self.check()
        match event:
            case ev.Executed():
                self._executed(event)
            case ev.Queued(request_id=name, outputs=outputs):
                if name in self._lengths:
                    self._break(REQUESTS, f"request {name!r} arrives again, but it has not ended")
                session = self._state.sessions.of_request.get(name)
                before = 0 if session is None else session.place.num_kept
                self._lengths[name] = before + (len(event.prompt) + len(outputs)) // 4
                self._moved = True
            case ev.Finished(request_id=name):
                self._finished(event)
            case ev.Delivered(request_id=name):
                self._delivered(name)
            case ev.Recovered():
                self._pending.clear()

    def check(self) -> None:
        """Check the state after the last event."""
        state = self._state
        if self._moved and state.requests.keys() != self._lengths.keys():
            name = min(state.requests.keys() ^ self._lengths.keys())
            which = "is live, but has ended" if name in state.requests else "is gone, but has not ended"
            self._break(REQUESTS, f"request {name!r} {which}")
        self._moved = False
        for name in self._grown:
            if name in state.requests and (found := _length(state, name)) != self._lengths[name]:
                text = f"request {name!r} has {found} tokens; with the tokens of its steps it should have "
                self._break(ANSWERS, f"{text}{self._lengths[name]}")
        self._grown.clear()
        if self._chunk is not None:
            session = state.sessions.all.get(self._chunk[0])
            if session is not None and not np.array_equal(session.tokens, self._chunk[1]):
                text = f"session {session.session_id!r} has {len(session.tokens)} tokens, which are not the "
                self._break(ANSWERS, f"{text}{len(self._chunk[1])} tokens of its last request")
            self._chunk = None

    def outputs(self, outputs: Iterable[Output]) -> None:
        """Check that the engine's outputs contain exactly the tokens and ends since the last call."""
        for output in outputs:
            name = output.request_id
            pending = self._pending.pop(name, None) or _Pending()
            if list(pending.tokens) != list(output.token_ids):
                text = f"the output of request {name!r} has the tokens {list(output.token_ids)[:8]}, but its "
                self._break(DELIVERIES, f"{text}steps gave {list(pending.tokens)[:8]}")
            if pending.end != output.finish_reason:
                text = f"the output of request {name!r} has the end {output.finish_reason}; the log has "
                self._break(DELIVERIES, f"{text}{pending.end}")
        for name, pending in self._pending.items():
            what = "its end" if not pending.tokens else f"{len(pending.tokens)} of its tokens"
            self._break(DELIVERIES, f"no output has {what} of request {name!r}")
        self._pending.clear()

    def _executed(self, event: ev.Executed) -> None:
        state = self._state
        sampled, broken = state.sampled_rows(), {index for index, _ in event.errors}
        counts = np.ones(len(sampled), np.int64)
        if event.counts is not None:
            counts = np.frombuffer(event.counts, np.int32)
        ends = np.cumsum(counts)
        tokens = np.frombuffer(event.token_ids, np.int32)
        for index, row in enumerate(sampled.tolist()):
            req_state = state.requests_by_row[row]
            if req_state is None or state.ended[row] == LEFT or index in broken:
                continue
            name = req_state.request.request_id
            first = int(ends[index] - counts[index])
            room = int(state.max_total[row]) - self._lengths.get(name, 0)
            given = tokens[first : first + min(int(counts[index]), max(0, room))].tolist()
            self._lengths[name] = self._lengths.get(name, 0) + len(given)
            self._grown.append(name)
            if self._has_outputs and given:
                self._pending.setdefault(name, _Pending()).tokens.extend(given)

    def _finished(self, event: ev.Finished) -> None:
        name = event.request_id
        self._moved = True
        session, req_state = self._state.sessions.of_request.get(name), self._state.requests.get(name)
        if session is not None and req_state is not None and event.reason in ev.ANSWERED:
            self._chunk = session.session_id, self._state.known_tokens(req_state).copy()
        if event.reason != "rejected" and name not in self._lengths:
            self._break(REQUESTS, f"request {name!r} ends, but it is not live")
        if name in self._lengths or event.reason == "rejected":
            self._lengths.pop(name, None)
            self._ended.add(name)
        if self._has_outputs:
            self._pending.setdefault(name, _Pending()).end = event.reason

    def _delivered(self, name: str) -> None:
        if name in self._ended:
            self._ended.discard(name)
        elif name in self._lengths:
            self._break(DELIVERIES, f"the answer of request {name!r} is delivered, but it has not ended")
        elif self._begins:
            text = f"an answer of request {name!r} is delivered, but the request has no undelivered answer"
            self._break(DELIVERIES, text)

    def _break(self, name: str, text: str) -> None:
        if name in self._names:
            self.broken = self.broken or (name, text)


def _length(state: State, name: str) -> int:
    req_state = state.requests[name]
    return len(req_state.tokens) if req_state.row == NO_ROW else int(state.num_tokens[req_state.row])

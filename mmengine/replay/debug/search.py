"""Searches a log for a position, forward or backwards. A walker decides where the search stops."""

from typing import Protocol

from mmengine.events import vocabulary as ev
from mmengine.replay.debug.facts import Facts
from mmengine.replay.debug.navigator import Cursor, Navigator
from mmengine.replay.debug.stops import Stop
from mmengine.replay.timeline import is_scheduling


class Walker(Protocol):
    """Looks at positions in order, and decides where a search stops."""

    def begin(self, cursor: Cursor) -> None:
        """Look at the position where a search begins."""

    def first(self, cursor: Cursor) -> str:
        """Return why the search stops at the log's first position, or "". Called instead of `begin` if the
        search begins there.
        """

    def hits(self, cursor: Cursor) -> str:
        """Return why the search stops at the next position, or ""."""


class Steps:
    """Stops at positions where the next record is a step's first decision."""

    def __init__(self) -> None:
        self._decided = -1

    def begin(self, cursor: Cursor) -> None:
        state, record = cursor.state, cursor.record
        is_begun = state.is_open or state.preempted_in_step
        self._decided = state.step if is_begun else state.step - 1
        if record is not None and is_scheduling(state, record.event):
            self._decided = record.step

    def first(self, cursor: Cursor) -> str:
        self._decided = -1
        return self.hits(cursor)

    def hits(self, cursor: Cursor) -> str:
        record = cursor.record
        if record is None or record.step <= self._decided or not is_scheduling(cursor.state, record.event):
            return ""
        self._decided = record.step
        return f"step {record.step}"


class EventsOf:
    """Stops at records that name a request, and at EXECUTED records that contain tokens for the request."""

    def __init__(self, name: str):
        self._name = name

    def begin(self, cursor: Cursor) -> None:
        """Do nothing: each record is checked independently."""

    def first(self, cursor: Cursor) -> str:
        return self.hits(cursor)

    def hits(self, cursor: Cursor) -> str:
        record = cursor.record
        if record is None:
            return ""
        if getattr(record.event, "request_id", "") == self._name:
            return type(record.event).__name__
        req_state = cursor.state.requests.get(self._name)
        if req_state is None or req_state.row < 0:
            return ""
        if isinstance(record.event, ev.Executed) and req_state.row in cursor.state.sampled_rows():
            return "Executed"
        return ""


class Stops:
    """Stops at breakpoints and watchpoints. `found`: the breakpoint or watchpoint at which the search
    stopped.
    """

    def __init__(self, stops: list[Stop]):
        self._stops = [stop for stop in stops if stop.is_enabled]
        self.found: Stop | None = None
        self._facts: Facts | None = None

    def begin(self, cursor: Cursor) -> None:
        for stop in self._stops:
            stop.begin(self._of(cursor))

    def first(self, cursor: Cursor) -> str:
        return self._ask(cursor, "first")

    def hits(self, cursor: Cursor) -> str:
        return self._ask(cursor, "hits")

    def _ask(self, cursor: Cursor, how: str) -> str:
        reasons = [(stop, getattr(stop, how)(self._of(cursor))) for stop in self._stops]
        for stop, why in reasons:
            if why:
                self.found = stop
                return str(why)
        return ""

    def _of(self, cursor: Cursor) -> Facts:
        if self._facts is None or self._facts.cursor is not cursor:
            self._facts = Facts(cursor)
        return self._facts


def search_forward(navigator: Navigator, walker: Walker) -> str:
    """Move to the next position where `walker` stops, or to the end. Return the reason for the stop, or
    "".
    """
    walker.begin(navigator.cursor)
    while navigator.record is not None:
        navigator.advance()
        if why := walker.hits(navigator.cursor):
            return why
    return ""


def search_back(navigator: Navigator, walker: Walker, before: int, count: int = 1) -> tuple[int, str]:
    """Return the last position before `before` where `walker` stops, and the reason. With `count` n, return
    the n-th such position, counted backwards from `before`. Returns (-1, "") if there is none. The
    navigator's position does not change.
    """
    most = before - 1
    while most >= navigator.first:
        mark = navigator.marks.before(max(navigator.first, most - 1))
        found: list[tuple[int, str]] = []
        for cursor in navigator.walk(mark.position):
            if cursor.position > most:
                break
            if cursor.position > mark.position:
                why = walker.hits(cursor)
            elif mark.position == navigator.first:
                why = walker.first(cursor)
            else:
                walker.begin(cursor)
                continue
            if why:
                found.append((cursor.position, why))
        if len(found) >= count:
            return found[-count]
        if mark.position == navigator.first:
            break
        count -= len(found)
        most = mark.position
    return -1, ""

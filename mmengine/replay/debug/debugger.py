"""A debugger for a log: moves, searches, breakpoints, watchpoints, and questions about the state."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mmengine.errors import InvalidRequest, LogError
from mmengine.replay.debug.event_text import event_text
from mmengine.replay.debug.facts import FIELDS, Facts
from mmengine.replay.debug.filters import checked_object, parse_filter
from mmengine.replay.debug.navigator import Cursor, Navigator
from mmengine.replay.debug.saved.marks import MAX_BYTES
from mmengine.replay.debug.search import EventsOf, Steps, Stops, Walker, search_back, search_forward
from mmengine.replay.debug.state_diff import Change, changes, values_of
from mmengine.replay.debug.stops import Condition, Stop, Watch, changed, compiled, evaluated, value_of
from mmengine.replay.debug.views import owners_of
from mmengine.replay.findings import Findings

MAX_STOPS = 1000


class Write(NamedTuple):
    """The last record that changed an object, such as a block. `position`: the record's number. `step`: the
    record's step. `event`: the event's class. `text`: the record's effect and the reason. `change`: the
    object's values before and after the record. `owners`: for a block, the requests with this block before
    and after the record.
    """

    position: int
    step: int
    event: str
    text: str
    change: str
    owners: tuple[str, str] = ("", "")


def open_debugger(
    folder: Path,
    findings: Findings | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    progress: Callable[[int], None] = lambda position: None,
) -> "Debugger":
    """Open a debugger at the log's beginning. For the arguments, see Navigator."""
    return Debugger(Navigator(folder, findings, max_bytes, progress))


class Debugger:
    """A debugger for a log.

    `can_evaluate`: whether conditions may be Python expressions, which only a terminal allows. Methods that
    move return the reason for stopping, or "", for example at the log's end.
    """

    def __init__(self, navigator: Navigator, *, can_evaluate: bool = False):
        self.navigator, self.can_evaluate = navigator, can_evaluate
        self.stops: list[Stop] = []
        self._next_number = 1

    @property
    def facts(self) -> Facts:
        return Facts(self.navigator.cursor)

    # Moves

    def goto_step(self, number: int) -> str:
        """Move to the decisions for step `number`. Raises LogError if the log does not contain the step."""
        navigator, back = self.navigator, self.navigator.position
        before = [mark for mark in navigator.marks.all if mark.step < number]
        navigator.go((before or navigator.marks.all)[-1].position)
        walker = Steps()
        why = walker.first(navigator.cursor)
        last = -1
        while not why or (last := int(why.split()[1])) < number:
            why = search_forward(navigator, _Continued(walker))
            if not why:
                break
        if last != number:
            navigator.go(back)
            seen = f"; the last step is {last}" if last < number else ""
            raise LogError(f"step {number} has no decisions in this log{seen}")
        return why

    def goto_time(self, ms: float) -> str:
        """Move to the first record at or after this time. `ms`: time since the log's first record."""
        navigator = self.navigator
        before = [mark for mark in navigator.marks.all if mark.time_ns < ms * 1e6]
        navigator.go((before or navigator.marks.all)[-1].position)
        while navigator.record is not None and navigator.cursor.time_ns < ms * 1e6:
            navigator.advance()
        return "" if navigator.record is None else f"{navigator.cursor.time_ns / 1e6:.1f} ms"

    def goto_event(self, position: int) -> str:
        """Move to a record. Raises LogError if no record has this number."""
        back = self.navigator.position
        self.navigator.go(position)
        if self.navigator.position != position:
            end = self.navigator.position
            self.navigator.go(back)
            raise LogError(f"there is no record {position}; the log has {self.navigator.first} to {end - 1}")
        return f"record {position}"

    def goto_request(self, name: str) -> str:
        """Move to a request's last arrival. Raises LogError for an unknown id."""
        if name not in self.navigator.arrivals:
            self._read_all()
        found = self.navigator.arrivals.get(name)
        if not found:
            raise LogError(f"no request in this log has the id {name!r}; info requests lists them")
        return self.goto_event(found[-1])

    def goto_start(self) -> str:
        self.navigator.go(self.navigator.first)
        return "the log begins"

    def goto_end(self) -> str:
        self.navigator.go(2**63)
        return ""

    def step(self, count: int = 1) -> str:
        """Move forward over `count` steps, or back if `count` is negative."""
        return self._repeat(Steps(), count)

    def step_event(self, count: int = 1) -> str:
        """Move forward over `count` records, or back if `count` is negative."""
        here = self.navigator.position
        self.navigator.go(max(self.navigator.first, here + count))
        return "" if self.navigator.position == here else f"record {self.navigator.position}"

    def step_request(self, name: str, count: int = 1) -> str:
        """Move to the next record that concerns a request, or to the previous one if `count` is negative."""
        return self._repeat(EventsOf(name), count)

    def go_on(self, until: Stop | None = None) -> str:
        """Continue to the next breakpoint or watchpoint, or to `until`."""
        walker = Stops(self.stops if until is None else [*self.stops, until])
        return self._told(walker, search_forward(self.navigator, walker))

    def go_back(self) -> str:
        """Continue backwards to a breakpoint or watchpoint, or to the log's beginning."""
        walker = Stops(self.stops)
        position, why = search_back(self.navigator, walker, self.navigator.position)
        self.navigator.go(position if position >= 0 else self.navigator.first)
        return self._told(walker, why)

    def _told(self, walker: Stops, why: str) -> str:
        if not why or walker.found is None:
            return ""
        walker.found.num_hits += 1
        return f"{walker.found.kind} {walker.found.number}, {why}"

    def _repeat(self, walker: Walker, count: int) -> str:
        navigator, why = self.navigator, ""
        if count < 0:
            position, why = search_back(navigator, walker, navigator.position, -count)
            navigator.go(position if position >= 0 else navigator.first)
        for _ in range(count):
            why = search_forward(navigator, walker)
            if not why:
                break
        return why

    def _read_all(self) -> None:
        back = self.navigator.position
        if self.navigator.end is None:
            self.navigator.go(2**63)
            self.navigator.go(back)

    # Breakpoints

    def condition(self, text: str) -> Condition:
        """Convert a filter to a condition. With `can_evaluate`, the text may also be a Python expression.
        Raises InvalidRequest for any other text.
        """
        try:
            return Condition.of_filter(parse_filter(text))
        except InvalidRequest:
            if not self.can_evaluate:
                raise
        return Condition.of_code(text)

    def add_breakpoint(self, text: str) -> Stop:
        """Add a breakpoint with a condition. Raises InvalidRequest if the condition cannot be parsed."""
        return self._add(Stop(self._next_number, self.condition(text)))

    def add_watch(self, text: str) -> Stop:
        """Add a watchpoint on `block N`, `row N`, `entry KEY`, `request ID`, a field, or an expression."""
        return self._add(Watch(self._next_number, *self._watched(text)))

    def remove(self, number: int) -> None:
        """Remove a breakpoint. Raises InvalidRequest for an unknown number."""
        self.stops.remove(self.stop(number))

    def stop(self, number: int) -> Stop:
        """Return the breakpoint with this number. Raises InvalidRequest if there is none."""
        found = [each for each in self.stops if each.number == number]
        if not found:
            raise InvalidRequest(f"there is no breakpoint {number}; info breakpoints lists them")
        return found[0]

    def _add(self, stop: Stop) -> Stop:
        if len(self.stops) >= MAX_STOPS:
            raise InvalidRequest(f"there are {MAX_STOPS} breakpoints already; delete some")
        self.stops.append(stop)
        self._next_number += 1
        return stop

    def _watched(self, text: str) -> tuple[str, Callable[[Facts], object]]:
        words = text.split()
        if len(words) == 2 and words[0] in ("block", "row", "entry", "request"):
            return text, value_of(*checked_object(*words))
        if text in FIELDS:
            return text, lambda facts: facts.field(text)
        if not self.can_evaluate:
            raise InvalidRequest(
                f"{text!r} cannot be watched; use block N, row N, entry KEY, request ID, or a field: "
                f"{', '.join(FIELDS)}"
            )
        code = compiled(text)
        return text, lambda facts: evaluated(code, facts)

    # Questions

    def value(self, text: str) -> object:
        """Return the value of `text` (see `add_watch`) at this position."""
        return self._watched(text)[1](self.facts)

    def last_write(self, text: str) -> Write | None:
        """Return the last change to the value of `text` (see `add_watch`) before this position, or None."""
        name, value = self._watched(text)
        watch = Watch(0, name, value)
        position, _ = search_back(self.navigator, Stops([watch]), self.navigator.position + 1)
        if position < 0:
            return None
        cursor = next(self.navigator.walk(position - 1))
        record = cursor.record
        assert record is not None  # `search_back` found the change in this record.
        old, owners = value(Facts(cursor)), self._owners(text, cursor)
        said = event_text(cursor.state, record.event)
        after = next(self.navigator.walk(position))
        change = changed(old, value(Facts(after)))
        both = owners, self._owners(text, after)
        kind = type(record.event).__name__
        return Write(record.sequence, record.step, kind, said, change, both)

    @staticmethod
    def _owners(text: str, cursor: Cursor) -> str:
        words = text.split()
        if words[0] != "block" or len(words) != 2:
            return ""
        return ", ".join(owners_of(cursor.state).get(int(words[1]), ())) or "no request"

    def diff(self, first: int, second: int) -> list[Change]:
        """Return the differences between the states at two positions."""
        states = [values_of(next(self.navigator.walk(position)).state) for position in (first, second)]
        return changes(*states)


class _Continued:
    """Wraps a walker (the object that decides where a search stops). A new search continues with the walker's
    state from the last search.
    """

    def __init__(self, walker: Walker):
        self._walker = walker

    def begin(self, cursor: Cursor) -> None:
        """Do nothing, so that the walker keeps its state from the last search."""

    def first(self, cursor: Cursor) -> str:
        return self._walker.first(cursor)

    def hits(self, cursor: Cursor) -> str:
        return self._walker.hits(cursor)

"""Debugs two logs side by side, for example from a good and a bad build. Requests correspond by their order
of arrival.
"""

from mmengine.errors import LogError
from mmengine.replay.debug.debugger import Debugger
from mmengine.replay.debug.filters import parse_filter
from mmengine.replay.debug.state_diff import Change, changes, values_of
from mmengine.replay.debug.stops import Condition, Stop
from mmengine.replay.debug.views import Cell, Table
from mmengine.replay.diff import LogDifference, Side, diff

MAX_VALUE = 400  # characters of a differing value
MAX_SETTINGS = 40
END = 2**62  # after all records


class Pair:
    """A debugger on a log, and the debugger `other` on a second log. `names`: the logs' folder names,
    or the paths if the names are equal.
    """

    def __init__(self, debugger: Debugger, other: Debugger):
        self.debugger, self.other = debugger, other
        folders = [each.navigator.folder.resolve() for each in (debugger, other)]
        same = folders[0].name == folders[1].name
        self.names = tuple(str(folder) if same else folder.name for folder in folders)
        self._found: LogDifference | None = None

    @property
    def difference(self) -> LogDifference:
        """The first difference of the two logs. Raises `diff`'s errors."""
        if self._found is None:
            folders = self.debugger.navigator.folder, self.other.navigator.folder
            findings = self.debugger.navigator.findings, self.other.navigator.findings
            self._found = diff(*folders, "arrival", findings=findings)
        return self._found

    def places(self) -> tuple[int, int] | None:
        """Return each log's record number at the first difference, or None for equal logs."""
        found = self.difference
        if found.sides is None:
            return None
        first, second = found.sides
        return _place(first), _place(second)

    def goto_difference(self) -> str:
        """Move both debuggers to the first difference. Return a description of the difference, or "" for
        equal logs.
        """
        places = self.places()
        if places is None:
            return ""
        for debugger, place in zip((self.debugger, self.other), places, strict=True):
            debugger.navigator.go(place)
        return described(self.difference)

    @property
    def is_at_difference(self) -> bool:
        """Whether both debuggers are at the first difference."""
        places = self.places()
        if places is None:
            return False
        both = zip((self.debugger.navigator, self.other.navigator), places, strict=True)
        return all(each.position == place or each.record is None and place > END for each, place in both)

    def go_on(self) -> str:
        """Continue `debugger` to its next breakpoint or to the first difference. At the difference, `other`
        moves there too. Return the reason for the stop, or "" at the end of the log.
        """
        navigator, places = self.debugger.navigator, self.places()
        if places is None or navigator.position >= places[0]:
            return self.debugger.go_on()
        text = f"position = {places[0]}"
        why = self.debugger.go_on(Stop(0, Condition.of_filter(parse_filter(text))))
        if navigator.position < places[0] and why:
            return why
        return f"first difference: {self.goto_difference()}"

    def align(self) -> str:
        """Move the other debugger to the corresponding position, and return the position's name. Before the
        first difference, the step numbers correspond. After the difference, the numbers of arrived requests
        correspond.
        """
        navigator, places = self.debugger.navigator, self.places()
        record = navigator.record
        if places is not None and navigator.position >= places[0]:
            if navigator.position == places[0]:
                self.other.navigator.go(places[1])
                return "the first difference"
            return self._goto_arrival(navigator.state.num_arrived)
        if record is None:
            self.other.goto_end()
            return "the end"
        try:
            return self.other.goto_step(record.step)
        except LogError:  # The other log has no step with this number.
            self.other.goto_end()
            return "the end"

    def _goto_arrival(self, count: int) -> str:
        """Move the other debugger to the position after the arrival of request number `count` (the first
        request has number 1).
        """
        navigator = self.other.navigator
        navigator.go(navigator.first)
        for cursor in navigator.walk(navigator.first):
            if cursor.state.num_arrived >= count or cursor.record is None:
                navigator.go(cursor.position)
                break
        return f"after {navigator.state.num_arrived} arrivals"

    def state_changes(self) -> list[Change]:
        """Return how the states at the two positions differ."""
        states = [values_of(each.navigator.state) for each in (self.debugger, self.other)]
        return changes(*states)

    def table(self) -> Table:
        """Return the first difference, with a column for each log."""
        found = self.difference
        rows: list[tuple[Cell, ...]] = []
        if found.sides is not None:
            one, two = found.sides
            name = f"{found.field} of {found.request}" if found.request else found.field
            rows = [
                ("record", _number(one.sequence), _number(two.sequence)),
                ("step", _number(one.step), _number(two.step)),
                ("event", one.event or "the log ends", two.event or "the log ends"),
                (name, _value(one), _value(two)),
                ("running", one.running, two.running),
                ("waiting", one.waiting, two.waiting),
                ("free blocks", one.free_blocks, two.free_blocks),
            ]
        settings = list(found.settings.items())[:MAX_SETTINGS]
        rows += [(f"setting {name}", str(a)[:MAX_VALUE], str(b)[:MAX_VALUE]) for name, (a, b) in settings]
        if found.sides is None:
            return Table("no difference", ("", *self.names), rows, "the two logs have the same events")
        note = f"{described(found)}; {found.events} events before are the same"
        return Table("first difference", ("", *self.names), rows, note)


def described(found: LogDifference) -> str:
    """Return a text that names the kind of a difference, or "" for equal logs."""
    kinds = {
        "inputs": "the inputs differ",
        "decisions": "the inputs are the same, and the decisions differ",
        "end": "one log ends",
    }
    return kinds.get(found.kind, "")


def _place(side: Side) -> int:
    return side.sequence if side.sequence >= 0 else END + 1


def _number(value: int) -> Cell:
    return value if value >= 0 else ""


def _value(side: Side) -> str:
    return str(side.value)[:MAX_VALUE] if side.event else ""

"""The state that a debugger session's commands share."""

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.debugger import Debugger
from mmengine.replay.debug.event_text import event_text
from mmengine.replay.debug.pair import Pair
from mmengine.replay.debug.views import Block, Text


class SessionBase:
    """A debugger session for a log. `request`: the selected request, or "". `marks`: named positions.
    `is_over`: whether the command `quit` was run. `pair`: both logs if a second log is open, else None.
    """

    def __init__(self, debugger: Debugger, other: Debugger | None = None):
        self.debugger = debugger
        self.pair = None if other is None else Pair(debugger, other)
        self.request = ""
        self.marks: dict[str, int] = {}
        self.is_over = False

    @property
    def debuggers(self) -> list[Debugger]:
        """The debugger of each open log."""
        return [self.debugger] if self.pair is None else [self.pair.debugger, self.pair.other]

    def here(self, why: str = "") -> list[Block]:
        """Return a text with the current position and the next record."""
        navigator = self.debugger.navigator
        record = navigator.record
        lines = [why] if why else []
        if record is None:
            what = (
                "a decision that the state cannot take" if navigator.findings.last else "the end of the log"
            )
            lines.append(f"step {navigator.state.step}: {what}")
        else:
            kind, ms = type(record.event).__name__, navigator.cursor.time_ns / 1e6
            lines.append(f"step {record.step}, record {record.sequence}, {ms:.1f} ms: {kind}")
            lines.append(f"  {event_text(navigator.state, record.event)}")
        found = [each for each in navigator.findings.listed if each.sequence == navigator.position]
        lines += [f"  breaks the rule {each.rule}: {each.text}" for each in found]
        return [Text(lines)]

    def selected(self, name: str) -> str:
        """Select the request `name` and return the selected request's id. An empty `name` keeps the
        selection. Raises InvalidRequest if no request is selected.
        """
        if not name and not self.request:
            raise InvalidRequest("name a request, or select one with: request ID")
        self.request = name or self.request
        return self.request

"""Collects the data for the debugger's web page: the log's records, and the positions at which each view,
object and field changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from mmengine.core.state.state import State
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.debug.commands import session  # noqa: F401 - registers the commands
from mmengine.replay.debug.commands.registry import COMMANDS, help_of
from mmengine.replay.debug.commands.views import INFO, fields_help
from mmengine.replay.debug.debugger import Debugger
from mmengine.replay.debug.event_text import event_text
from mmengine.replay.debug.facts import FIELDS, OBJECTS, Facts
from mmengine.replay.debug.filters import OBJECT_NAMES, TYPE_NAMES
from mmengine.replay.debug.navigator import Cursor
from mmengine.replay.debug.search import Steps
from mmengine.replay.debug.state_diff import values_of
from mmengine.replay.debug.steps import decision_table, drafts_view, queue_view
from mmengine.replay.debug.views import MAX_ROWS, VIEWS, owners_of, request_view
from mmengine.replay.timeline import is_scheduling
from mmengine.version import __version__

MAX_RECORDS = 3000
# Number of records between saved states. At each position, some views replay the records since a saved state.
SAVE_EVERY = 32
_OF_RECORDS = ("position", "event", "request", "reason", "time_ms")


@dataclass(slots=True)
class Changes:
    """The changes of named values: name -> [(position, new value)]. The new value None means that the value
    is gone.
    """

    lists: dict[str, list[tuple[int, object]]] = field(default_factory=dict)
    _now: dict[str, object] = field(default_factory=dict)

    def at(self, position: int, values: dict[str, object]) -> None:
        """Record all values at a position. Positions must ascend."""
        for name in self._now.keys() - values.keys():
            self.lists[name].append((position, None))
            del self._now[name]
        for name, value in values.items():
            if name not in self._now or self._now[name] != value:
                self.lists.setdefault(name, []).append((position, value))
                self._now[name] = value


class PageData:
    """Collects a page's data from a debugger. The debugger's position moves to the log's end."""

    def __init__(self, debugger: Debugger):
        self._navigator = debugger.navigator
        self._navigator.marks.every_records = SAVE_EVERY
        self.num_records = 0
        self._records: list[tuple[int, int, str, str, int, str, str, str]] = []
        self._views, self._objects, self._fields = Changes(), Changes(), Changes()
        self._values, self._owners, self._requests = Changes(), Changes(), Changes()
        self._steps: list[tuple[int, int]] = []
        self._touched: dict[str, list[tuple[int, str]]] = {}
        self._decided: dict[int, object] = {}

    def collect(self, progress: Callable[[int], None] = lambda position: None) -> dict[str, object]:
        """Return the page's data. Raises LogError if the log is missing, damaged, or has too many records."""
        navigator = self._navigator
        walker = Steps()
        why = walker.first(navigator.cursor)
        while True:
            if why:
                self._steps.append((navigator.position, int(why.split()[1])))
            self._take(navigator.cursor)
            progress(navigator.position)
            if navigator.record is None:
                break
            if navigator.position - navigator.first > MAX_RECORDS:
                raise LogError(
                    f"the log in {navigator.folder} has more than {MAX_RECORDS:,} records, the limit of a "
                    f"page without a server; use mmengine log debug {navigator.folder} --web"
                )
            navigator.advance()
            why = walker.hits(navigator.cursor)
        return self._data()

    def _take(self, cursor: Cursor) -> None:
        state, record, position = cursor.state, cursor.record, cursor.position
        if record is not None:
            event = record.event
            names = str(getattr(event, "request_id", "")), str(getattr(event, "reason", ""))
            kind, ms = type(event).__name__, f"{cursor.time_ns / 1e6:.1f}"
            text = event_text(state, event)
            self._records.append((record.sequence, record.step, kind, text, cursor.time_ns, *names, ms))
            self.num_records += 1
            self._touch(state, event, position)
            if is_scheduling(state, event):
                self._decided[position] = decision_table(self._navigator)
        views: dict[str, object] = {name: view(state) for name, view in VIEWS.items()}
        views |= {"queue": queue_view(self._navigator), "drafts": drafts_view(self._navigator)}
        self._views.at(position, views)
        facts = Facts(cursor)
        self._fields.at(position, {name: facts.field(name) for name in FIELDS if name not in _OF_RECORDS})
        self._objects.at(position, _objects(facts, state))
        self._values.at(position, dict(values_of(state)))
        self._owners.at(position, {str(block): ", ".join(who) for block, who in owners_of(state).items()})
        self._requests.at(position, {name: request_view(state, name).lines for name in state.requests})

    def _touch(self, state: State, event: ev.Event, position: int) -> None:
        """Record which requests the event concerns."""
        names = {str(getattr(event, "request_id", "")): type(event).__name__}
        if isinstance(event, ev.Executed):
            held = (state.requests_by_row[row] for row in state.sampled_rows().tolist())
            names |= {each.request.request_id: "Executed" for each in held if each is not None}
        for name, why in names.items():
            if name:
                self._touched.setdefault(name, []).append((position, why))

    def _data(self) -> dict[str, object]:
        navigator = self._navigator
        is_cut = navigator.findings.last is not None
        return {
            "name": navigator.folder.resolve().name,
            "version": __version__,
            "first": navigator.first,
            "num_blocks": navigator.config.num_blocks,
            "records": self._records,
            "end_text": "a decision that the state cannot take" if is_cut else "the end of the log",
            "end_step": navigator.state.step,
            "steps": self._steps,
            "arrivals": navigator.arrivals,
            "touched": self._touched,
            "decided": self._decided,
            "views": self._views.lists,
            "fields": self._fields.lists,
            "objects": self._objects.lists,
            "values": self._values.lists,
            "owners": self._owners.lists,
            "requests": self._requests.lists,
            "findings": [
                (each.sequence, each.rule, each.text, str(each)) for each in navigator.findings.listed
            ],
            "info": INFO,
            "most_rows": MAX_ROWS,
            "commands": [
                (each.name, each.aliases, each.usage, each.text, each.group) for each in COMMANDS.values()
            ],
            "field_names": FIELDS,
            "object_fields": {name: OBJECTS[kind] for name, kind in OBJECT_NAMES.items()},
            "kinds": TYPE_NAMES,
            "fields_help": fields_help(),
            "help": help_of(""),
        }


def _objects(facts: Facts, state: State) -> dict[str, object]:
    """Return the facts about each object, keyed by its kind and name. Free blocks without cached content are
    left out.
    """
    pool = state.blocks
    used = np.flatnonzero((pool.references > 0) | (pool.content >= 0)).tolist()
    found: dict[str, object] = {f"request {name}": facts.req(name) for name in state.requests}
    found |= {f"block {number}": facts.block(number) for number in used}
    found |= {f"row {number}": facts.row(number) for number in range(state.config.num_rows)}
    found |= {f"entry {key.hex()}": facts.entry(key.hex()) for key in state.encoder.entries}
    return found


def encoded(data: dict[str, object]) -> bytes:
    """Return the data as JSON."""
    return msgspec.json.encode(data)

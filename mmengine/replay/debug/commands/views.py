"""The debugger commands that show the state at the current position."""

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.commands.registry import command, number_of
from mmengine.replay.debug.commands.session_base import SessionBase
from mmengine.replay.debug.commands.stopping import stops_table
from mmengine.replay.debug.event_text import event_text
from mmengine.replay.debug.facts import FIELDS, OBJECTS, EntryFacts
from mmengine.replay.debug.filters import OBJECT_NAMES, checked_object, find_object
from mmengine.replay.debug.steps import drafts_view, queue_view
from mmengine.replay.debug.views import (
    MAX_ROWS,
    VIEWS,
    Block,
    Cell,
    Table,
    Text,
    blocks_view,
    encoder_view,
    request_view,
    shortened,
)

SHOWS = "Show"
INFO = ("queue", *VIEWS, "drafts", "requests", "findings", "breakpoints")
LIST_AROUND = 5


@command("info", "i", usage=f"{' | '.join(INFO)} | request ID | block N | entry KEY", group=SHOWS)
def info(session: SessionBase, rest: str) -> list[Block]:
    """Show a part of the state.
    info queue      waiting requests, and why each waits
    info rows       running requests
    info blocks     KV blocks with owners and hashes; info block 17 shows one
    info prefix     the prefix index
    info encoder    encoder cache entries with their holders
    info drafts     drafts, and how many were accepted
    info sessions, info adapters, info requests, info findings, info breakpoints
    Long tables are shortened. Add the word all to see the whole table.
    """
    words = rest.split()
    most = MAX_ROWS
    if words and words[-1] == "all":
        words, most = words[:-1], 10**9
    if not words:
        return [VIEWS["state"](session.debugger.navigator.state)]
    if len(words) == 2 and words[0] in OBJECT_NAMES:
        return _object(session, *words)
    name = next((each for each in INFO if each == words[0]), "")
    if not name:
        near = [each for each in INFO if each.startswith(words[0])]
        if len(near) != 1:
            raise InvalidRequest(f"there is nothing like {rest!r} to show; use {', '.join(INFO)}")
        name = near[0]
    return [_shown(session, name, most)]


def _shown(session: SessionBase, name: str, most: int) -> Block:
    navigator = session.debugger.navigator
    if name == "queue":
        return shortened(queue_view(navigator), most)
    if name == "drafts":
        return shortened(drafts_view(navigator), most)
    if name == "breakpoints":
        return stops_table(session)
    if name == "requests":
        return shortened(_requests(session), most)
    if name == "findings":
        found = navigator.findings
        lines = [str(each) for each in found.listed] or ["no decision read so far breaks a rule"]
        more = found.count - len(found.listed)
        return Text([*lines, *([f"{more} more"] if more else [])])
    view = VIEWS[name](navigator.state)
    return shortened(view, most) if isinstance(view, Table) else view


def _requests(session: SessionBase) -> Table:
    navigator = session.debugger.navigator
    rows: list[tuple[Cell, ...]] = []
    for name, positions in navigator.arrivals.items():
        live = navigator.state.requests.get(name)
        where = "" if live is None else "waits" if live.row < 0 else f"row {live.row}"
        rows.append((name, positions[-1], where))
    return Table("requests read so far", ("request", "arrived at record", "now"), rows)


def _object(session: SessionBase, kind: str, name: str) -> list[Block]:
    debugger = session.debugger
    state = debugger.navigator.state
    kind, name = checked_object(kind, name)
    found = find_object(debugger.facts, kind, name)
    if found is None:
        raise InvalidRequest(f"the state has no {kind} {name} here")
    if kind == "request":
        session.request = name
        return [request_view(state, name)]
    if kind == "block":
        return [blocks_view(state, [int(name)])]
    if kind == "entry":
        table = encoder_view(state)
        table.rows = [row for row in table.rows if isinstance(found, EntryFacts) and row[0] == found.key[:16]]
        return [table]
    return [Table(f"row {name}", found._fields, [tuple(found)])]


@command("request", usage="ID", group=SHOWS)
def request(session: SessionBase, rest: str) -> list[Block]:
    """Select a request, and show it."""
    name = session.selected(rest)
    state = session.debugger.navigator.state
    if name not in state.requests:
        return [Text([f"{name} is selected; it is not live here"])]
    return [request_view(state, name)]


@command("list", "l", usage="[N]", group=SHOWS)
def list_(session: SessionBase, rest: str) -> list[Block]:
    """Show the records around this position: N records before it and N records after it."""
    around = min(500, number_of(rest, "a number of records", LIST_AROUND))
    navigator = session.debugger.navigator
    here = navigator.position
    rows: list[tuple[Cell, ...]] = []
    for cursor in navigator.walk(max(navigator.first, here - around)):
        if cursor.record is None or cursor.position > here + around:
            break
        sign = "=>" if cursor.position == here else ""
        kind, text = type(cursor.record.event).__name__, event_text(cursor.state, cursor.record.event)
        rows.append((sign, cursor.record.sequence, cursor.record.step, kind, text))
    return [Table("records", ("", "record", "step", "event", ""), rows)]


def fields_help() -> list[Block]:
    """Return tables with the fields that conditions may use."""
    fields: list[tuple[Cell, ...]] = [(name, text) for name, text in FIELDS.items()]
    objects: list[tuple[Cell, ...]] = [
        (f"{name} …", ", ".join(OBJECTS[kind])) for name, kind in OBJECT_NAMES.items()
    ]
    return [
        Table("fields", ("field", ""), fields),
        Table("objects", ("object", "fields"), objects, "example: break block 17 references > 1"),
    ]

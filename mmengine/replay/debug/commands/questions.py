"""The debugger commands that answer questions about the log, such as last, diff, decide and print."""

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.commands.registry import command, help_of, number_of
from mmengine.replay.debug.commands.session_base import SessionBase
from mmengine.replay.debug.commands.views import fields_help
from mmengine.replay.debug.steps import decision_table
from mmengine.replay.debug.stops import compiled, evaluated, shown
from mmengine.replay.debug.views import MAX_ROWS, Block, Cell, Table, Text, shortened

ASKS = "Ask"
MAX_VALUE = 2000  # Maximum number of characters of a printed value.


@command("last", usage="block N | row N | entry KEY | request ID | FIELD", group=ASKS)
def last(session: SessionBase, rest: str) -> list[Block]:
    """Show the last record that changed an object, and the reason.
    last block 17, last row 3, last entry 080f, last request req-17, last free_blocks
    To go to this record: goto event N.
    """
    if not rest:
        raise InvalidRequest("last needs an object: block N, row N, entry KEY, request ID, or a field")
    found = session.debugger.last_write(rest)
    if found is None:
        return [Text([f"no record before this position changes {rest}"])]
    lines = [
        f"{rest} was last changed by record {found.position} (step {found.step}, {found.event})",
        f"  {found.text}",
        f"  {found.change}",
    ]
    before, after = found.owners
    if before != after:
        lines.append(f"  held by {before} before, by {after} after")
    return [Text(lines)]


@command("diff", usage="[FROM [TO]]", group=ASKS)
def diff(session: SessionBase, rest: str) -> list[Block]:
    """Show the differences between the states at two positions.
    FROM and TO are record numbers or marks. By default, TO is this position, and FROM is the previous record.
    """
    words = rest.split()
    most = MAX_ROWS
    if words and words[-1] == "all":
        words, most = words[:-1], 10**9
    here = session.debugger.navigator.position
    places = [session.marks[word] if word in session.marks else _position(session, word) for word in words]
    first = places[0] if places else max(session.debugger.navigator.first, here - 1)
    second = places[1] if len(places) > 1 else here
    rows: list[tuple[Cell, ...]] = [tuple(change) for change in session.debugger.diff(first, second)]
    header = ("", f"before record {first}", f"before record {second}")
    return [shortened(Table("difference", header, rows), most)]


def _position(session: SessionBase, word: str) -> int:
    position = number_of(word, "the number of a record, or a mark")
    if position < session.debugger.navigator.first:
        raise InvalidRequest(f"there is no record {position}")
    return position


@command("decide", usage="", group=ASKS)
def decide(session: SessionBase, rest: str) -> list[Block]:
    """Let this build decide the step again, and compare its decisions with the log."""
    return [decision_table(session.debugger.navigator)]


@command("print", "p", usage="EXPRESSION", group=ASKS)
def print_(session: SessionBase, rest: str) -> list[Block]:
    """Print a field, or in the terminal a Python expression over the read-only view.
    print free_blocks
    print req("req-17").tokens - req("req-17").computed
    print view.block_table[0, :4]
    """
    debugger = session.debugger
    if not debugger.can_evaluate:
        return [Text([shown(debugger.value(rest))])]
    value = evaluated(compiled(rest), debugger.facts)
    return [Text([repr(value)[:MAX_VALUE]])]


@command("help", "h", usage="[COMMAND | fields]", group=ASKS)
def help_(session: SessionBase, rest: str) -> list[Block]:
    """Explain the commands."""
    return fields_help() if rest == "fields" else help_of(rest)


@command("quit", "q", "exit", group=ASKS)
def quit_(session: SessionBase, rest: str) -> list[Block]:
    """End the session."""
    session.is_over = True
    return []

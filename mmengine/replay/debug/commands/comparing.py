"""The debugger commands on two logs that are open side by side."""

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.commands.registry import command, find
from mmengine.replay.debug.commands.session_base import SessionBase
from mmengine.replay.debug.pair import Pair
from mmengine.replay.debug.views import MAX_ROWS, Block, Cell, Table, Text, shortened

COMPARES = "Compare two logs"


def _pair(session: SessionBase) -> Pair:
    if session.pair is None:
        raise InvalidRequest("only one log is open; open two with: mmengine log debug DIR OTHER")
    return session.pair


@command("difference", group=COMPARES)
def difference(session: SessionBase, rest: str) -> list[Block]:
    """Go to the first difference between the two logs, in both logs.
    Requests correspond by their order of arrival. The command continue also stops at the first difference.
    """
    pair = _pair(session)
    if not pair.goto_difference():
        return [pair.table()]
    return [pair.table(), *both(session, "where")]


@command("align", group=COMPARES)
def align(session: SessionBase, rest: str) -> list[Block]:
    """Move the other log to the position that corresponds to this log's position.
    Before the first difference, this is the same step. After it, as many requests have arrived in both logs.
    """
    where = _pair(session).align()
    return [Text([f"{_pair(session).names[1]}: {where}"]), *other(session, "where")]


@command("other", usage="COMMAND", group=COMPARES)
def other(session: SessionBase, rest: str) -> list[Block]:
    """Run a command on the other log, such as: other info queue."""
    pair = _pair(session)
    word, _, arguments = rest.partition(" ")
    if not word:
        raise InvalidRequest("say what to run on the other log, such as: other info queue")
    run = find(word).run
    if run in (other, both, difference, align):
        raise InvalidRequest(f"{word} is about both logs already")
    here, session.debugger = session.debugger, pair.other
    try:
        return run(session, arguments.strip())
    finally:
        session.debugger = here


@command("both", usage="COMMAND", group=COMPARES)
def both(session: SessionBase, rest: str) -> list[Block]:
    """Run a command on both logs, such as: both info queue."""
    pair = _pair(session)
    word, _, arguments = rest.partition(" ")
    if not word:
        raise InvalidRequest("say what to run on both logs, such as: both info queue")
    theirs = other(session, rest)
    ours = find(word).run(session, arguments.strip())
    return [Text([f"{pair.names[0]}:"]), *ours, Text([f"{pair.names[1]}:"]), *theirs]


@command("compare", usage="[all]", group=COMPARES)
def compare(session: SessionBase, rest: str) -> list[Block]:
    """Show how the states of the two logs differ, each log at its own position."""
    pair = _pair(session)
    rows: list[tuple[Cell, ...]] = [tuple(change) for change in pair.state_changes()]
    if not rows:
        return [Text(["the states are equal"])]
    return [shortened(Table("states", ("", *pair.names), rows), 10**9 if rest == "all" else MAX_ROWS)]

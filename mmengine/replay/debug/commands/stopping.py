"""The debugger commands for breakpoints and watchpoints."""

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.commands.registry import command, number_of
from mmengine.replay.debug.commands.session_base import SessionBase
from mmengine.replay.debug.filters import event_named
from mmengine.replay.debug.stops import Stop
from mmengine.replay.debug.views import Block, Table, Text

STOPS = "Stop"


@command("break", "b", usage="STEP | EVENT [ID] [if CONDITION] | CONDITION", group=STOPS)
def break_(session: SessionBase, rest: str) -> list[Block]:
    """Stop where a condition holds, when moving forward or back.
    break 120                     where step 120 is decided
    break preempted               before each record of this kind
    break preempted req-17        … that names req-17
    break free_blocks < 4         where this becomes true
    break entry 080f references > 1
    break finished if request ~ batch and waiting > 0
    A condition is FIELD OPERATOR LITERAL, joined with and; help fields lists the fields.
    In the terminal, a condition may be a Python expression: break waiting > 2 * running
    """
    return _added(session.debugger.add_breakpoint(condition_of(rest)))


def condition_of(text: str) -> str:
    """Convert the text after `break` to a breakpoint's condition. Raises InvalidRequest."""
    if not text:
        raise InvalidRequest("say where to stop: break STEP, break EVENT, or break CONDITION")
    if text.isascii() and text.isdigit():
        return f"step = {text}"
    head, has_if, condition = text.partition(" if ")
    if head.startswith("if ") and not has_if:
        return head.removeprefix("if ").strip()
    words = head.split()
    kind = event_named(words[0].removeprefix("event="))
    if kind is None and words[0] == "event" and len(words) > 1 and event_named(words[1]):
        words = words[1:]
        kind = event_named(words[0])
    if kind is None or len(words) > 2:
        return text.removeprefix("if ").strip()
    parts = [f"event = {kind}"]
    if len(words) == 2:
        parts.append(f"request = '{words[1]}'")
    return " and ".join([*parts, *([condition.strip()] if has_if else [])])


@command("watch", usage="block N | row N | entry KEY | request ID | FIELD", group=STOPS)
def watch(session: SessionBase, rest: str) -> list[Block]:
    """Stop after each record that changes a value, when moving forward or back.
    watch block 17, watch row 3, watch entry 080f, watch request req-17, watch free_blocks
    In the terminal, the value may be a Python expression.
    """
    if not rest:
        raise InvalidRequest("say what to watch: block N, row N, entry KEY, request ID, or a field")
    return _added(session.debugger.add_watch(rest))


@command("delete", "d", usage="[N]", group=STOPS)
def delete(session: SessionBase, rest: str) -> list[Block]:
    """Delete a breakpoint or watchpoint. Without a number, delete all of them."""
    if not rest:
        session.debugger.stops.clear()
        return [Text(["all breakpoints deleted"])]
    session.debugger.remove(number_of(rest, "the number of a breakpoint"))
    return [Text([f"breakpoint {rest} deleted"])]


@command("disable", usage="N", group=STOPS)
def disable(session: SessionBase, rest: str) -> list[Block]:
    """Disable a breakpoint without deleting it."""
    return _enable(session, rest, is_enabled=False)


@command("enable", usage="N", group=STOPS)
def enable(session: SessionBase, rest: str) -> list[Block]:
    """Enable a disabled breakpoint."""
    return _enable(session, rest, is_enabled=True)


def _enable(session: SessionBase, rest: str, *, is_enabled: bool) -> list[Block]:
    stop = session.debugger.stop(number_of(rest, "the number of a breakpoint"))
    stop.is_enabled = is_enabled
    return [Text([f"{stop.kind} {stop.number} {'enabled' if is_enabled else 'disabled'}"])]


def stops_table(session: SessionBase) -> Table:
    """Return a table with the breakpoints and watchpoints."""
    rows: list[tuple[str | int | float, ...]] = [
        (each.number, each.kind, each.text, each.num_hits, "" if each.is_enabled else "disabled")
        for each in session.debugger.stops
    ]
    return Table("breakpoints", ("number", "kind", "condition", "hits", ""), rows)


def _added(stop: Stop) -> list[Block]:
    return [Text([f"{stop.kind} {stop.number}: {stop.text}"])]

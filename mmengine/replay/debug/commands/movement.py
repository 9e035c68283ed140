"""The debugger commands that move to another position, such as goto, step and continue."""

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.commands.registry import command, number_of
from mmengine.replay.debug.commands.session_base import SessionBase
from mmengine.replay.debug.views import Block

MOVES = "Move"


@command("step", "s", usage="[N]", group=MOVES)
def step(session: SessionBase, rest: str) -> list[Block]:
    """Go to the position where the next step is decided.
    With a number, go N steps.
    """
    return session.here(session.debugger.step(number_of(rest, "a number of steps", 1)))


@command("reverse-step", "rs", usage="[N]", group=MOVES)
def reverse_step(session: SessionBase, rest: str) -> list[Block]:
    """Go back to the position where the previous step was decided."""
    return session.here(session.debugger.step(-number_of(rest, "a number of steps", 1)))


@command("stepi", "si", usage="[N]", group=MOVES)
def stepi(session: SessionBase, rest: str) -> list[Block]:
    """Apply the next record.
    With a number, apply N records.
    """
    return session.here(session.debugger.step_event(number_of(rest, "a number of records", 1)))


@command("reverse-stepi", "rsi", usage="[N]", group=MOVES)
def reverse_stepi(session: SessionBase, rest: str) -> list[Block]:
    """Undo the last record."""
    return session.here(session.debugger.step_event(-number_of(rest, "a number of records", 1)))


@command("next", "n", usage="[ID]", group=MOVES)
def next_(session: SessionBase, rest: str) -> list[Block]:
    """Go to the next record that concerns a request.
    Without an id, the selected request is used. The commands next, request and goto select a request.
    """
    return session.here(session.debugger.step_request(session.selected(rest)))


@command("reverse-next", "rn", usage="[ID]", group=MOVES)
def reverse_next(session: SessionBase, rest: str) -> list[Block]:
    """Go back to the last record that concerns a request."""
    return session.here(session.debugger.step_request(session.selected(rest), -1))


@command("continue", "c", group=MOVES)
def continue_(session: SessionBase, rest: str) -> list[Block]:
    """Go to the next breakpoint or watchpoint, or to the end of the log.
    With two logs, go at most to their first difference.
    """
    pair = session.pair
    if pair is None or session.debugger is not pair.debugger:
        return session.here(session.debugger.go_on())
    why = pair.go_on()
    return [*([pair.table()] if pair.is_at_difference else []), *session.here(why)]


@command("reverse-continue", "rc", group=MOVES)
def reverse_continue(session: SessionBase, rest: str) -> list[Block]:
    """Go back to the last breakpoint or watchpoint, or to the beginning of the log."""
    return session.here(session.debugger.go_back())


@command(
    "goto", "run-to", usage="STEP | event N | time MS | request ID | mark NAME | start | end", group=MOVES
)
def goto(session: SessionBase, rest: str) -> list[Block]:
    """Go to a step, a record, a time, or a request's arrival.
    goto 120          where step 120 is decided
    goto event 271    record 271
    goto time 35.5    the first record at 35.5 ms after the log's first, or later
    goto request ID   the request's arrival; goto ID does the same
    goto mark NAME    a position that the command mark saved
    goto start, goto end
    """
    debugger = session.debugger
    word, _, name = rest.partition(" ")
    name = name.strip()
    if word in ("start", "end") and not name:
        return session.here(debugger.goto_start() if word == "start" else debugger.goto_end())
    if word in ("event", "record") and name:
        return session.here(debugger.goto_event(number_of(name, "the number of a record")))
    if word == "step" and name:
        return session.here(debugger.goto_step(number_of(name, "the number of a step")))
    if word == "time" and name:
        return session.here(debugger.goto_time(_ms(name)))
    if word == "mark" and name:
        if name not in session.marks:
            raise InvalidRequest(f"there is no mark {name!r}; mark NAME saves the position")
        return session.here(debugger.goto_event(session.marks[name]))
    if rest.isascii() and rest.isdigit():
        return session.here(debugger.goto_step(number_of(rest, "the number of a step")))
    if not rest:
        raise InvalidRequest("say where: goto STEP, event N, time MS, request ID, start or end")
    session.request = name if word == "request" and name else rest
    return session.here(debugger.goto_request(session.request))


def _ms(text: str) -> float:
    try:
        value = float(text.removesuffix("ms"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise InvalidRequest(f"{text!r} is not a time in ms since the log's first record")
    return value


@command("mark", "checkpoint", usage="NAME", group=MOVES)
def mark(session: SessionBase, rest: str) -> list[Block]:
    """Save this position under a name, for goto mark and diff."""
    if not rest or len(session.marks) >= 1000:
        raise InvalidRequest("name the mark: mark NAME; at most 1000 are kept")
    session.marks[rest] = session.debugger.navigator.position
    return session.here(f"mark {rest}")


@command("where", "w", group=MOVES)
def where(session: SessionBase, rest: str) -> list[Block]:
    """Print the position and the next record."""
    return session.here()

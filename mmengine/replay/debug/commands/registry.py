"""The table of the debugger's commands, with lookup by name and help texts."""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.commands.session_base import SessionBase
from mmengine.replay.debug.views import Block, Table, Text

Run = Callable[[SessionBase, str], list[Block]]
MAX_LINE = 4000  # Maximum number of characters in a line.


class Command(NamedTuple):
    """A debugger command. `usage`: its arguments. `text`: its help text, whose first line is a summary."""

    name: str
    aliases: tuple[str, ...]
    usage: str
    text: str
    group: str
    run: Run


COMMANDS: dict[str, Command] = {}
GROUPS = ("Move", "Stop", "Show", "Ask", "Compare two logs")  # In the order of the help.


def command(name: str, *aliases: str, usage: str = "", group: str) -> Callable[[Run], Run]:
    """Register a function as a command. The function's docstring is the command's help text."""

    def register(run: Run) -> Run:
        text = "\n".join(line.strip() for line in (run.__doc__ or "").strip().splitlines())
        COMMANDS[name] = Command(name, aliases, usage, text, group, run)
        return run

    return register


def find(word: str) -> Command:
    """Return the command with this name, alias, or unambiguous abbreviation. Raises InvalidRequest."""
    for each in COMMANDS.values():
        if word == each.name or word in each.aliases:
            return each
    found = [each for each in COMMANDS.values() if each.name.startswith(word)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(f"{word!r} is ambiguous: {', '.join(each.name for each in found)}")
    raise InvalidRequest(f"there is no command {word!r}; help lists the commands")


def number_of(text: str, what: str, default: int | None = None) -> int:
    """Return the integer in a text. Raises InvalidRequest. `what`: describes the expected value in the
    error.
    """
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if abs(value) >= 2**62:
        raise InvalidRequest(f"{text!r} is not {what}")
    return value


def help_of(name: str) -> list[Block]:
    """Return the help text for a command, or for all commands."""
    if name:
        found = find(name)
        also = f"  (also: {', '.join(found.aliases)})" if found.aliases else ""
        return [Text([f"{found.name} {found.usage}".rstrip() + also, *found.text.splitlines()])]
    groups: dict[str, list[tuple[str | int | float, ...]]] = {name: [] for name in GROUPS}
    for each in COMMANDS.values():
        names = ", ".join((each.name, *each.aliases))
        summary = each.text.splitlines()[0] if each.text else ""
        groups[each.group].append((names, each.usage, summary))
    blocks: list[Block] = [Table(group, ("command", "", ""), rows) for group, rows in groups.items()]
    advice = (
        "Start with: goto 1, info queue, break preempted, continue, info request ID, last block 17, "
        "reverse-continue. help COMMAND explains a command, help fields lists what conditions read."
    )
    return [*blocks, Text([advice])]

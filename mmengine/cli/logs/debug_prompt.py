"""Reads the debugger's commands from a terminal, with completion and a history."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmengine.replay.debug.commands.session import Session

MAX_CHOICES = 200


def prompts(session: "Session", prompt: str) -> Iterator[str]:
    """Yield the lines that a person types after `prompt`, until the input's end."""
    with suppress(ImportError):  # Python may be built without readline.
        import readline

        readline.set_completer_delims(" \t\n")
        readline.set_completer(_Completer(session).complete)
        readline.parse_and_bind("tab: complete")
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            print()


class _Completer:
    def __init__(self, session: "Session"):
        self._session = session
        self._choices: list[str] = []

    def complete(self, text: str, number: int) -> str | None:
        """Return completion `number` of the word `text`, or None if there are fewer completions."""
        import readline

        if number == 0:
            line = readline.get_line_buffer()[: readline.get_begidx()]
            self._choices = completions(self._session, line, text)
        return f"{self._choices[number]} " if number < len(self._choices) else None


def completions(session: "Session", line: str, text: str) -> list[str]:
    """Return the words that complete `text`. `line`: the words before `text`."""
    from mmengine.replay.debug.commands.registry import COMMANDS
    from mmengine.replay.debug.commands.views import INFO
    from mmengine.replay.debug.facts import FIELDS
    from mmengine.replay.debug.filters import OBJECT_NAMES, TYPE_NAMES

    words = line.split()
    navigator = session.debugger.navigator
    names: list[str] = []
    if not words:
        names = list(COMMANDS)
    elif words[0] in ("help", "h") and len(words) == 1:
        names = [*COMMANDS, "fields"]
    elif words[0] in ("info", "i") and len(words) == 1:
        names = [*INFO, *OBJECT_NAMES]
    elif words[0] in ("break", "b", "watch", "last", "print", "p") and len(words) == 1:
        kinds = [name.lower() for name in TYPE_NAMES] if words[0] in ("break", "b") else []
        names = [*kinds, *OBJECT_NAMES, *FIELDS]
    elif words[0] in ("goto", "run-to") and len(words) == 1:
        names = ["event", "time", "request", "mark", "start", "end", *navigator.state.requests]
    elif words[-1] == "mark":
        names = list(session.marks)
    elif words[-1] == "entry":
        names = [key.hex()[:16] for key in navigator.state.encoder.entries]
    else:
        names = list(navigator.state.requests)
    shown = (name for name in dict.fromkeys(names) if name.startswith(text) and name.isprintable())
    return list(shown)[:MAX_CHOICES]

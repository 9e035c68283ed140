"""What the verbs of `mmengine log` share: their arguments, and how text of a log is printed.

A log comes from anybody; nothing of it reaches a terminal before `clean` or `short` looked at it.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmengine.errors import LogError

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from rich.console import Console

MAX_SHOWN_CHARS = 300  # of a cell of a table; the rest is left out
Folder = Annotated[Path, typer.Argument(help="The folder that was given as --log.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


def existing(folder: Path) -> Path:
    """The folder. Raises LogError when there is none."""
    if not folder.is_dir():
        raise LogError(f"there is no folder {folder}; give the one that was named as --log")
    return folder


def console() -> "Console":
    """Standard output. A pipe has no width of its own, and a table cut to 80 columns would be of no
    use there; COLUMNS says another."""
    from rich.console import Console  # lazy: help needs none of it

    if sys.stdout.isatty():
        return Console(highlight=False)
    columns = os.environ.get("COLUMNS", "")
    return Console(width=int(columns) if columns.isdecimal() else 160, highlight=False)


def printable(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """The beginning of a text, without what a terminal would act on."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:most])


def clean(text: str) -> str:
    """`printable`, also without what rich would act on: for tables and markup."""
    from rich.markup import escape

    return escape(printable(text))


def short(value: Any, most: int = MAX_SHOWN_CHARS) -> str:
    """A value as Python writes it, cut."""
    text = printable(repr(value), most + 1)
    return text if len(text) <= most else f"{text[:most]}…"


def ms(nanoseconds: int) -> str:
    """Empty for what did not come to pass (-1)."""
    return "" if nanoseconds < 0 else f"{nanoseconds / 1e6:.1f}"


def print_json(value: dict[str, Any]) -> None:
    """One line. JSON escapes what a terminal would act on."""
    import json

    print(json.dumps(value))

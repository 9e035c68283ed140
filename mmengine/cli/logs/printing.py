"""Shared arguments of the `mmengine log` commands, and functions that print a log's texts safely.

A log is untrusted, so its texts reach a terminal only through `printable`, `clean` or `short`.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmengine.errors import LogError

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from rich.console import Console

MAX_SHOWN_CHARS = 300  # Longer table cells are truncated.
Folder = Annotated[Path, typer.Argument(help="Folder that was passed as --log.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, an object per line.")]


def existing(folder: Path) -> Path:
    """Return `folder`. Raises LogError if the folder does not exist."""
    if not folder.is_dir():
        raise LogError(f"there is no folder {folder}; name the folder that was passed as --log")
    return folder


def console() -> "Console":
    """Return a console for standard output.

    The width is 160 columns in a pipe, because rich's default width of 80 would truncate tables. The
    environment variable COLUMNS overrides the width.
    """
    from rich.console import Console  # Lazy: help does not need it.

    if sys.stdout.isatty():
        return Console(highlight=False)
    columns = os.environ.get("COLUMNS", "")
    return Console(width=int(columns) if columns.isdecimal() else 160, highlight=False)


def printable(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Return the first `most` characters of a text, with U+FFFD for each unprintable character."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:most])


def clean(text: str) -> str:
    """Return the `printable` text with escaped rich markup."""
    from rich.markup import escape

    return escape(printable(text))


def short(value: Any, most: int = MAX_SHOWN_CHARS) -> str:
    """Return the printable repr of a value, truncated to `most` characters."""
    text = printable(repr(value), most + 1)
    return text if len(text) <= most else f"{text[:most]}…"


def wall(unix_ns: int) -> str:
    """Convert a Unix time in ns to the local time with milliseconds. 0 means unknown, and gives ""."""
    if unix_ns <= 0 or unix_ns >= 2**62:
        return ""
    from datetime import UTC, datetime

    at = datetime.fromtimestamp(unix_ns // 10**9, UTC).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S}.{unix_ns // 10**6 % 1000:03}{at:%z}"


def ms(nanoseconds: int) -> str:
    """Convert nanoseconds to a text in milliseconds. A negative value means unknown, and gives ""."""
    return "" if nanoseconds < 0 else f"{nanoseconds / 1e6:.1f}"


def print_json(value: dict[str, Any]) -> None:
    """Print an object as a line of JSON, with escaped control characters."""
    import json

    print(json.dumps(value))

"""Shared arguments and safe printing for the `mmengine log` commands.

A log is untrusted: its texts reach a terminal only through `clean` or `short`.
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
    """Return the folder. Raises LogError if it does not exist."""
    if not folder.is_dir():
        raise LogError(f"there is no folder {folder}; name the folder that was passed as --log")
    return folder


def console() -> "Console":
    """Return a console for standard output.

    If standard output is a pipe, the width is 160 columns, because rich's default width of 80 would truncate
    tables. COLUMNS overrides the width.
    """
    from rich.console import Console  # Lazy: help does not need it.

    if sys.stdout.isatty():
        return Console(highlight=False)
    columns = os.environ.get("COLUMNS", "")
    return Console(width=int(columns) if columns.isdecimal() else 160, highlight=False)


def printable(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Return the first `most` characters, with U+FFFD for characters that are not printable."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:most])


def clean(text: str) -> str:
    """Return `printable` text with rich's markup escaped, for tables and markup."""
    from rich.markup import escape

    return escape(printable(text))


def short(value: Any, most: int = MAX_SHOWN_CHARS) -> str:
    """Return a value's printable repr, truncated to `most` characters."""
    text = printable(repr(value), most + 1)
    return text if len(text) <= most else f"{text[:most]}…"


def wall(unix_ns: int) -> str:
    """Convert a Unix time in ns to the local time with milliseconds. 0, which means unknown, gives ""."""
    if unix_ns <= 0 or unix_ns >= 2**62:
        return ""
    from datetime import UTC, datetime

    at = datetime.fromtimestamp(unix_ns // 10**9, UTC).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S}.{unix_ns // 10**6 % 1000:03}{at:%z}"


def ms(nanoseconds: int) -> str:
    """Convert nanoseconds to text in milliseconds. Negative values, which mean unknown, give ""."""
    return "" if nanoseconds < 0 else f"{nanoseconds / 1e6:.1f}"


def print_json(value: dict[str, Any]) -> None:
    """Print an object as a line of JSON, in which control characters are escaped."""
    import json

    print(json.dumps(value))

"""Shows a progress bar on stderr if stderr is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # Heavy; help does not need rich.
    from rich.progress import Progress, TaskID

Count = Literal["number", "percent", ""]


class ProgressBar:
    """A progress bar. `is_shown`: whether stderr is a terminal."""

    def __init__(self, bar: "Progress", task: "TaskID") -> None:
        self._bar, self._task = bar, task
        self.is_shown = not bar.disable

    def advance(self) -> None:
        self._bar.advance(self._task)

    def update(
        self, completed: float | None = None, total: float | None = None, text: str | None = None
    ) -> None:
        """Set the finished amount, the total amount and the text beside the bar. None leaves a value
        unchanged.
        """
        self._bar.update(self._task, completed=completed, total=total, description=text)

    def note(self, text: str) -> None:
        """Set the text after the amounts."""
        self._bar.update(self._task, note=text)


@contextmanager
def progress_bar(
    text: str, total: float | None = None, *, count: Count = "number", stays: bool = False
) -> Iterator[ProgressBar]:
    """Show a bar with `text` while the context lasts.

    `total`: the total amount; None if it is unknown. `count`: the format of the finished amount. With
    `stays`, the bar remains visible after the context.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    # Keep the current sys.stderr, because `log minimize` replaces sys.stderr while it tests commands.
    console = Console(file=sys.stderr)
    counts = {"number": (MofNCompleteColumn(),), "percent": (TaskProgressColumn(),), "": ()}
    columns = (
        TextColumn("{task.description}", markup=False),  # A log's name may look like markup.
        BarColumn(),
        *counts[count],
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
    )
    disabled = not console.is_terminal
    with Progress(*columns, console=console, disable=disabled, transient=not stays) as bar:
        yield ProgressBar(bar, bar.add_task(text, total=total, note=""))

"""How the loading of a model gets on, on stderr: a bar in a terminal, else a line now and then."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # heavy: loaded where there is a terminal
    from rich.progress import Progress

LINE_EVERY_S = 10.0


class Loading:
    """Called with the bytes of weights that are read, and all there are."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._told = 0.0  # when a line last came, or the first bytes
        self._bar: Progress | None = None

    def __call__(self, num_bytes: int, whole: int) -> None:
        if sys.stderr.isatty():
            self._draw(num_bytes, whole)
        elif not self._told:
            self._told = time.monotonic()
        elif time.monotonic() - self._told >= LINE_EVERY_S:
            self._told = time.monotonic()
            say(f"{num_bytes / 1e6:,.0f} of {whole / 1e6:,.0f} MB of weights are read")

    def _draw(self, num_bytes: int, whole: int) -> None:
        if self._bar is None:
            from rich.console import Console  # lazy: help needs no console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("weights")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=num_bytes, total=whole)

    def end(self) -> float:
        """How many seconds it took."""
        if self._bar is not None:
            self._bar.stop()
        return time.monotonic() - self._begun


@contextmanager
def loading(what: str) -> Iterator[Loading]:
    say(f"loading {what}")
    shown = Loading()
    collects = gc.isenabled()
    gc.disable()  # nearly all that is made here stays, and to look for the rest takes a tenth of the time
    try:
        yield shown
    except BaseException:
        shown.end()
        raise
    finally:
        if collects:
            gc.enable()
    say(f"loaded in {shown.end():.1f} s")


def say(text: str) -> None:
    print(f"mmengine: {text}", file=sys.stderr, flush=True)

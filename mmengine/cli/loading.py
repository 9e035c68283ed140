"""Shows progress on stderr while a model is loaded or a prompt is computed: a bar on a terminal, otherwise a
line every LINE_EVERY_S seconds.
"""

import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmengine.paused_collection import paused_collection

if TYPE_CHECKING:  # Heavy; loaded only on a terminal.
    from rich.progress import Progress

    from mmengine.build import Built

LINE_EVERY_S = 10.0


class Stage(NamedTuple):
    """A kind of progress: the name beside a bar, and the text of a progress line."""

    name: str
    line: str


WEIGHTS = Stage("weights", "{} of {} MB of weights are read")
PROMPT = Stage("prompt", "{} of {} tokens of the prompt are computed")
IMAGE = Stage("image, %", "{} of {} per cent of an image are encoded")


class Bar:
    """A progress bar. Call the object with the finished amount and the total."""

    def __init__(self, stage: Stage, *, counts_bytes: bool) -> None:
        self.stage, self._counts_bytes = stage, counts_bytes
        self._drawn: Stage | None = None
        self._begun = time.monotonic()
        # Monotonic time of the last printed line. Before the first line, the time of the first call.
        self._told = 0.0
        self._bar: Progress | None = None
        self.said_anything = False
        self.whole = 0  # The largest total so far.

    def __call__(self, done: int, whole: int) -> None:
        self.whole = max(self.whole, whole)
        if sys.stderr.isatty():
            self._draw(done, whole)
        elif not self._told:
            self._told = time.monotonic()
        elif time.monotonic() - self._told >= LINE_EVERY_S:
            self._told, self.said_anything = time.monotonic(), True
            unit = 1e6 if self._counts_bytes else 1
            say(self.stage.line.format(f"{done / unit:,.0f}", f"{whole / unit:,.0f}"))

    def _draw(self, done: int, whole: int) -> None:
        if self._bar is None:
            from rich.console import Console  # Lazy: help needs no console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            count = DownloadColumn() if self._counts_bytes else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self.stage.name)
            self._bar.start()
        if self.stage is not self._drawn:  # Restart the bar, because stages differ in speed.
            self._drawn = self.stage
            self._bar.reset(self._bar.task_ids[0], description=self.stage.name)
        self._bar.update(self._bar.task_ids[0], completed=done, total=whole)

    def end(self) -> float:
        """Remove the bar, and return the elapsed seconds."""
        if self._bar is not None:
            self._bar.stop()
        return time.monotonic() - self._begun


class Loading(Bar):
    """A progress bar for weights. Call the object with the number of bytes read and packed so far, and the
    total.
    """

    def __init__(self) -> None:
        super().__init__(WEIGHTS, counts_bytes=True)
        self.sizes = ""

    def loaded(self, built: "Built") -> None:
        """Store the sizes of the weights, the KV pool and the memory as text for the line "loaded …"."""
        from mmengine.checkpoint.model_files import model_note  # Lazy: numpy

        config, tokens = built.config, (built.config.num_blocks - 1) * built.config.block_size
        form = built.spec.weights_held
        held = "".join(f", {each}" for each in (form, model_note(built.folder)) if each)
        self.sizes = (
            f": {_size(self.whole)} of weights{held}; KV pool of {tokens:,} tokens ({config.num_blocks:,} "
            f"blocks, {_size(built.kv_bytes)} when full); max_model_len {config.max_model_len:,}; "
            f"{built.num_threads} thread{'s' * (built.num_threads > 1)}; {_size(built.free_bytes)} of memory "
            "free" + resident_text()
        )


@contextmanager
def loading(what: str, *, quiet: bool = False) -> Iterator[Loading]:
    """Show a bar for loading while the context lasts. With `quiet`, the line "loading …" is omitted, and the
    line "loaded …" is printed only after a progress line.
    """
    if not quiet:
        say(f"loading {what}")
    shown = Loading()
    try:
        with paused_collection():  # Garbage collections would take 10 % of the time.
            yield shown
    except BaseException:
        shown.end()
        raise
    seconds = shown.end()
    if shown.said_anything or not quiet:
        say(f"loaded in {seconds:.1f} s{shown.sizes}")


@contextmanager
def prompt_bar() -> Iterator[Bar]:
    """Show a bar while the context lasts: the prompt's computed tokens, or a large image's percentage."""
    bar = Bar(PROMPT, counts_bytes=False)
    try:
        yield bar
    finally:
        bar.end()


def say(text: str) -> None:
    print(f"mmengine: {text}", file=sys.stderr, flush=True)


def resident_text() -> str:
    """Return this process's resident memory as text, or "" if the system does not report the memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return ""
    return f"; {_size(pages * mmap.PAGESIZE)} resident"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"

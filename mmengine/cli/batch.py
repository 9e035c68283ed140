"""`mmengine run --batch`: a file of requests, a progress bar, and an orderly end on Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mmengine.errors import InvalidRequest
from mmengine.serve.answers import Completion
from mmengine.serve.batchfile import RequestFile, count_lines
from mmengine.serve.batching import run_batch
from mmengine.serve.engine import Engine

INTERRUPTED = 130


def run_batch_file(requests: Path, out: Path, log: Path | None, make_engine: Callable[[], Engine]) -> int:
    """Answer every line of `requests` into `out`. 0 when each line got an answer or an error, 130
    when a signal ended it before."""
    total = count_lines(requests)
    if out.exists() and out.samefile(requests):
        raise InvalidRequest("--out is the request file itself; name another file")
    console = Console(stderr=True)
    with requests.open("rb") as source, out.open("wb") as sink, make_engine() as engine:
        drain, stop = threading.Event(), threading.Event()
        with _signals(drain, stop), _progress(console) as progress:
            counts = _answer_all(engine, source, requests.parent, sink, progress, total, drain, stop)
    answered, failed, tokens, seconds = counts
    where = f"; log in {log}" if log is not None else ""
    console.print(
        f"{answered} answers and {failed} errors in {out}, {tokens} tokens in {seconds:.1f} s{where}",
        highlight=False,
        soft_wrap=True,
    )
    if answered + failed < total:
        console.print(f"stopped: {total - answered - failed} of {total} lines have no answer", soft_wrap=True)
        return INTERRUPTED
    return 0


def _answer_all(
    engine: Engine,
    source: BinaryIO,
    folder: Path,
    sink: BinaryIO,
    progress: Progress,
    total: int,
    drain: threading.Event,
    stop: threading.Event,
) -> tuple[int, int, int, float]:
    """Answers, errors, tokens and seconds."""
    file = RequestFile(source, folder)
    task = progress.add_task("answering", total=total, tokens=0)
    answered = failed = tokens = 0
    begin = time.monotonic()
    for index, answer in run_batch(engine, file, drain=drain, stop=stop):
        sink.write(file.answer_line(index, answer))
        sink.flush()
        if isinstance(answer, Completion) and answer.error() is None:
            answered += 1
            tokens += sum(len(choice.token_ids) for choice in answer.choices)
        else:
            failed += 1
        progress.update(task, advance=1, tokens=int(tokens / max(time.monotonic() - begin, 1e-3)))
    return answered, failed, tokens, time.monotonic() - begin


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens/s"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def _signals(drain: threading.Event, stop: threading.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM drains, the second stops, a third one kills."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not drain.is_set():
            drain.set()
            os.write(2, b"\nmmengine: finishing what runs; press again to stop at once\n")  # print may lock
        else:
            stop.set()
            signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

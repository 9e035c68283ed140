"""Implements `mmengine run --batch`, with a progress bar and a clean stop on Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from mmengine.cli.progress_bar import progress_bar
from mmengine.cli.supervisor import INTERRUPTED
from mmengine.core.resume import Resume, ResumeState
from mmengine.errors import InvalidRequest, MMEngineError
from mmengine.serve.batch.progress import AnswerFile, RequestIndex, answered_in, num_errors
from mmengine.serve.batch.request_file import WHOLE_FILE, RequestFile, Shard
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.text.request_output import Completion

HAS_ERRORS = 1


def run_batch_file(
    requests: Path,
    out: Path,
    log: Path | None,
    make_engine: Callable[[Resume | None], Engine],
    media_options: Mapping[str, object] | None = None,
    shard: Shard = WHOLE_FILE,
) -> int:
    """Answer every line in `requests`, or only the lines in `shard`, and write the answers to `out`.

    Return the exit code: 0 if each line got an answer, 1 if some lines got an error, 130 if a signal stopped
    the run. If `log` has an earlier run of the same batch, the batch continues from the log. `media_options`
    apply to all prompts.
    """
    index = RequestIndex(requests, shard=shard)
    check_apart(requests, out)
    console = Console(stderr=True)
    resume = None
    if log is not None and index.is_begun(log):
        answered = answered_in(out, index)
        if len(answered) == len(index):
            console.print(f"all {len(index)} lines have their answers in {out}", soft_wrap=True)
            return code_of_answers(out)
        resume = Resume(wanted=index.wanted(answered))
    with make_engine(resume) as engine:
        if log is not None and resume is None:
            index.begin(log)
        with closing(AnswerFile(out, index, fresh=resume is None)) as answers:
            return _answer_all(engine, index, answers, console, log, media_options)


def check_apart(requests: Path, out: Path) -> None:
    """Raise InvalidRequest if the answers would overwrite the request file."""
    if out.exists() and out.samefile(requests):
        raise InvalidRequest("--out is the request file itself; name another file")


def _answer_all(
    engine: Engine,
    index: RequestIndex,
    answers: AnswerFile,
    console: Console,
    log: Path | None,
    media_options: Mapping[str, object] | None,
) -> int:
    before = len(answers.answered)
    if engine.built.resumed is not None:
        console.print(
            f"resuming: {before} of {len(index)} lines have their answers; {_lost(engine.built.resumed)}",
            highlight=False,
            soft_wrap=True,
        )
    counts = _Counts()
    drain, stop = threading.Event(), threading.Event()
    bar_of_lines = progress_bar("answering", len(index), stays=True)
    with index.path.open("rb") as source, _signals(drain, stop), bar_of_lines as bar:
        bar.update(before)
        file = RequestFile(source, index.path.parent, answers.answered, media_options, index.shard)
        for place, answer in run_batch(engine, file, received=False, drain=drain, stop=stop):
            counts.take(answer)
            answers.write(file.answer_line(place, answer), _request_id(answer))
            _deliver(engine, answers, now=False)
            bar.advance()
            bar.note(f"{counts.tokens_a_second} tokens/s")
    _deliver(engine, answers, now=True)
    console.print(counts.line(answers.path, log), highlight=False, soft_wrap=True)
    for line in draft_lines(engine):
        console.print(line, highlight=False, soft_wrap=True)
    missing = len(index) - before - counts.answered - counts.failed
    if missing:
        console.print(f"stopped: {missing} of {len(index)} lines have no answer", soft_wrap=True)
        return INTERRUPTED
    return HAS_ERRORS if num_errors(answers.path) else 0  # Includes errors that an earlier process wrote.


def _deliver(engine: Engine, answers: AnswerFile, *, now: bool) -> None:
    """Record in the log which answers are on disk. Raises FileNotFoundError if the answer file is missing."""
    if written := answers.delivered(now=now):
        answers.check_place()
    for request_id in written:
        engine.requests.delivered(request_id)


def code_of_answers(out: Path) -> int:
    """Print how many answers in a complete answer file are errors, and return the batch's exit code."""
    failed = num_errors(out)
    if failed:
        Console(stderr=True).print(f"{failed} of them are errors", highlight=False, soft_wrap=True)
    return HAS_ERRORS if failed else 0


def draft_lines(engine: Engine) -> Iterator[str]:
    """Yield a line about each drafter that drafted or failed."""
    found = engine.stats().drafts
    for number, (name, failures) in enumerate(engine.drafters):
        if number in found:
            yield f"{name}: {found[number]}"
        if failures:
            yield f"{name}: failed {failures} times"


def _lost(resumed: ResumeState) -> str:
    """Describe the steps and log bytes that were lost when the previous process ended."""
    cut = "".join(f", {size} bytes were cut from {name} at {place}" for name, place, size in resumed.cuts)
    return f"{len(resumed.steps)} steps are computed again{cut}"


def _request_id(answer: Completion | MMEngineError) -> str:
    return answer.request_id if isinstance(answer, Completion) else ""


class _Counts:
    def __init__(self) -> None:
        self.answered = self.failed = self.tokens = 0
        self._begin = time.monotonic()

    def take(self, answer: Completion | MMEngineError) -> None:
        if isinstance(answer, Completion) and answer.error() is None:
            self.answered += 1
            self.tokens += sum(len(choice.token_ids) for choice in answer.choices)
        else:
            self.failed += 1

    @property
    def tokens_a_second(self) -> int:
        return int(self.tokens / max(time.monotonic() - self._begin, 1e-3))

    def line(self, out: Path, log: Path | None) -> str:
        seconds = time.monotonic() - self._begin
        where = f"; log in {log}" if log is not None else ""
        return (
            f"{self.answered} answers and {self.failed} errors in {out}, {self.tokens} tokens in "
            f"{seconds:.1f} s{where}"
        )


@contextmanager
def _signals(drain: threading.Event, stop: threading.Event) -> Iterator[None]:
    """Handle signals inside the context. The first SIGINT or SIGTERM sets `drain`, the second sets `stop`,
    and the third kills the process.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if not drain.is_set():
            drain.set()
            # `print` could deadlock in a signal handler.
            os.write(2, b"\nmmengine: finishing running requests; press again to stop at once\n")
        else:
            stop.set()
            signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

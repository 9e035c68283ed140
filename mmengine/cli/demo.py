"""`mmengine demo`: draws images, asks the included checkpoint about them, and verifies the log."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.run import printable
from mmengine.errors import Diverged

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from rich.console import Console
    from rich.table import Table

    from mmengine.cli.showcase import Question
    from mmengine.core.outputs import Stats

MAX_TOKENS = 160  # Maximum number of tokens in an answer.


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for the images and the logs.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed for the images.")] = 12,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Answer 12 questions about 6 images and a short video, in one batch, and verify the log.

    The images are drawn during the run; the checkpoint was not trained on them. Two answers are JSON.
    """
    from rich.console import Console  # Imported inside the function, because help does not need it.

    console = Console(highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    from mmengine.cli.showcase import questions

    asked = questions(folder, seed)
    log = _next_log(folder)
    stats, seconds = _answer(asked, log, device, console)
    console.print(_table(len(asked), stats, seconds))

    from mmengine.cli.logs.verify import report_lines
    from mmengine.replay.verify import verify

    report = verify(log)
    console.print(f"log {log}: {'; '.join(report_lines(report))}", markup=False, soft_wrap=True)
    if not report.ok:
        raise Diverged(f"the log in {log} does not verify; see mmengine log verify {log}")
    console.print(f"inspect it with: mmengine log show {log} --steps", markup=False, soft_wrap=True)


def _answer(asked: "list[Question]", log: Path, device: str, console: "Console") -> "tuple[Stats, float]":
    from rich.progress import Progress

    from mmengine.request import SamplingParams
    from mmengine.serve.batch.run_batch import run_batch
    from mmengine.serve.engine.engine import Engine
    from mmengine.serve.prompt.options import Options
    from mmengine.serve.prompt.prompt import Prompt
    from mmengine.serve.text.request_output import Completion

    options = Options(SamplingParams(max_tokens=MAX_TOKENS))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("loading the model", total=len(asked))
        with Engine(device=device, log=log) as engine:
            progress.update(task, description="answering")
            begin = time.monotonic()
            jobs = [(Prompt(messages=question.messages), options) for question in asked]
            for index, answer in run_batch(engine, jobs):
                text = answer.text if isinstance(answer, Completion) else f"error: {answer}"
                _print_answer(console, asked[index], text)
                progress.advance(task)
            return engine.stats(), time.monotonic() - begin


def _print_answer(console: "Console", question: "Question", text: str) -> None:
    mark = "right" if text == question.expected else "wrong"
    console.print(f"{question.about}: {question.text}", style="dim", markup=False)
    console.print(f"  {printable(text)}  ({mark})", markup=False, soft_wrap=True)
    if mark == "wrong":
        console.print(f"  expected: {question.expected}", markup=False, soft_wrap=True)


def _table(num_requests: int, stats: "Stats", seconds: float) -> "Table":
    from rich.table import Table

    table = Table("", "", show_header=False)
    for name, value in (
        ("requests", num_requests),
        ("prompt tokens", stats.num_prompt_tokens),
        ("new tokens", stats.num_output_tokens),
        ("steps", stats.steps),
        ("seconds", f"{seconds:.2f}"),
        ("new tokens/s", f"{stats.num_output_tokens / max(seconds, 1e-9):.0f}"),
        ("prompt tokens from the prefix cache", stats.num_cached_tokens),
        ("images and videos encoded", stats.num_encoded_items),
        ("encoder cache hits", stats.num_encoder_hits),
    ):
        table.add_row(name, str(value))
    return table


def _next_log(folder: Path) -> Path:
    """Return a new log folder, because a log is never overwritten."""
    number = 1
    while (folder / f"log-{number}").exists():
        number += 1
    return folder / f"log-{number}"

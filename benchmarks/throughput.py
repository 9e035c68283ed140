"""Compare mmengine's speed with transformers' on a CPU, with equal weights and prompts, in alternating runs.

    python benchmarks/throughput.py # all sections, about six minutes
    python benchmarks/throughput.py --section embedded --quick # one section, fewer rounds
    python benchmarks/throughput.py --repeat 3 --out table.md # three runs, medians
    python benchmarks/throughput.py --profile # time by phase and a flame graph

`--quick` ends within two minutes on every CPU. Its half_billion section uses one thread count, and omits
transformers where bfloat16 in transformers is too slow.
"""

import enum
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if not __package__:  # Run as a file: make the repository's root importable.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.common.measure import usable_cpus, use_threads
from benchmarks.common.repeat import medians
from benchmarks.common.report import (
    Part,
    machine_lines,
    markdown,
    show,
    target_dicts,
    target_line,
    target_table,
)

BENCHMARKS = Path(__file__).resolve().parent
WARM_UP = 4  # requests
TITLE = "mmengine and transformers on a CPU"


class Section(enum.StrEnum):
    EMBEDDED = "embedded"  # mixed requests and decoding, included checkpoint, float32
    HALF_BILLION = "half_billion"  # decoding and prefill, random weights, bfloat16
    ENCODER = "encoder"  # many questions about one image
    SHARE = "share"  # a step's time outside the model's forward pass


def main(
    section: Annotated[list[Section] | None, typer.Option(help="Sections to run (default: all).")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two rounds instead of five; at most two minutes.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the targets as a last line of JSON.")
    ] = False,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads for torch on both sides; half_billion sets its own.")
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="Markdown file for the tables.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of mixed requests.")] = 64,
    longest: Annotated[int, typer.Option(min=4, help="Maximum new tokens in an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds; 0: five, or two with --quick.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of everything; medians are shown.")] = 1,
    profile: Annotated[bool, typer.Option("--profile", help="Show a step's time by phase instead.")] = False,
    flame: Annotated[Path, typer.Option(help="File for the flame graph of --profile.")] = Path("flame.html"),
    raw: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure mmengine and transformers in alternating runs, with equal weights and prompts."""
    sections = section or list(Section)
    rounds = rounds or (2 if quick else 5)
    if repeat > 1:
        part = _repeated(repeat, sys.argv[1:])
    else:
        core_counts = [count for count in (1, 2) if count <= max(1, len(usable_cpus()))]
        if quick:
            core_counts = core_counts[-1:]
        part = Part()
        if Section.HALF_BILLION in sections and not profile:
            for count in core_counts:  # before this process starts threads or allocates weights
                part.add(_half_billion(count, quick))
        use_threads(threads)
        if profile:
            part = _profile(threads, requests, longest, Section.HALF_BILLION in (section or ()), flame)
        elif set(sections) - {Section.HALF_BILLION}:
            part.tables, part.targets = _in_order(_here(sections, threads, requests, longest, rounds), part)
    if raw is not None:
        raw.write_text(part.dumps(), encoding="utf-8")
    lines = machine_lines(threads)
    tables = [*part.tables, *([target_table(part.targets)] if part.targets else [])]
    show(tables, lines)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(TITLE, tables, lines), encoding="utf-8")
    if json_output:
        sys.stdout.flush()
        print(target_line(target_dicts(part.targets)), flush=True)


def _in_order(first: Part, then: Part) -> tuple[list, list]:
    return first.tables + then.tables, first.targets + then.targets


def _here(sections: list[Section], threads: int, requests: int, longest: int, rounds: int) -> Part:
    """Run the sections that use the included checkpoint, in this process."""
    import torch  # imported after the thread environment is set and --help is handled

    from benchmarks.common.engine_runner import EngineRunner
    from benchmarks.common.reference import Reference, make_inputs
    from benchmarks.common.workload import mixed
    from benchmarks.cpu.encoder import ImageFileRun, OneImageRun
    from benchmarks.cpu.sections import DecodeRuns, MixedRun
    from benchmarks.cpu.share import ShareRuns
    from mmengine.models.loader import resolve_folder

    torch.set_num_threads(threads)
    part = Part()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reference, ours, logged = (
            Reference(resolve_folder(None)),
            EngineRunner(),
            EngineRunner(folder / "log"),
        )
        stack.callback(ours.close)
        stack.callback(logged.close)
        asks = mixed(ours.engine.processor, requests, longest)
        for side in (ours, logged):
            side.answer(asks[:WARM_UP])
        for ask in asks[:WARM_UP]:
            reference.generate(make_inputs([ask.prepared]), 4)
        runs = []
        if Section.EMBEDDED in sections:
            runs.append(MixedRun(ours, logged, reference, asks, rounds))
            runs.append(DecodeRuns(ours, reference, longest, 2 * rounds))
        if Section.SHARE in sections:
            runs.append(ShareRuns(ours, logged, longest, rounds))
        if Section.ENCODER in sections:
            runs.append(OneImageRun(ours, reference, longest, rounds))
            runs.append(ImageFileRun(ours, folder, rounds))
        progress = stack.enter_context(_progress())
        for run in runs:
            part.add(run.run(_ticks(progress, run.title, run.num_ticks)))
    return part


def _half_billion(threads: int, quick: bool) -> Part:
    """Run the half_billion benchmark in its own process, since a process cannot change its thread count."""
    command = [
        sys.executable,
        str(BENCHMARKS),
        "half_billion",
        "--threads",
        str(threads),
        "--json",
        *(["--quick"] if quick else []),
    ]
    Console(stderr=True).print(f"half a billion weights, {threads} thread(s) ...", highlight=False)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"half_billion ended with {done.returncode}:\n{done.stderr}")
    return Part.loads(done.stdout.splitlines()[-1])


def _repeated(times: int, words: list[str]) -> Part:
    """Run the whole benchmark `times` times, each in its own process, and return the medians."""
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(times):
            Console(stderr=True).print(f"run {number + 1} of {times}", highlight=False)
            raw = Path(folder) / f"{number}.json"
            command = [sys.executable, __file__, *words, "--repeat", "1", "--raw", str(raw)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            parts.append(Part.loads(raw.read_text(encoding="utf-8")))
    return medians(parts)


def _profile(threads: int, requests: int, longest: int, half_billion: bool, flame: Path) -> Part:
    import torch  # imported after the thread environment is set

    from benchmarks.profiling.profile import profile

    torch.set_num_threads(threads)
    part = profile(requests, longest, half_billion, flame)
    Console(stderr=True).print(f"The flame graph is in {flame}; open it in a browser.", highlight=False)
    return part


def _ticks(progress: Progress, title: str, total: int) -> Callable[[], None]:
    task = progress.add_task(title, total=total)
    return lambda: progress.advance(task)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


if __name__ == "__main__":
    typer.run(main)

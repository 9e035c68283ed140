"""mmengine beside transformers: the embedded checkpoint in float32, the same prompts, on a CPU, in turn.

python benchmarks/throughput.py                    # the whole table
python benchmarks/throughput.py --quick --json     # fewer rounds; the last line is JSON
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from report import machine_lines, markdown, show, target, target_line
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

QUESTIONS = 16
DECODE_ROWS = (1, 16)
WARM_UP = 4  # requests
TITLE = "mmengine and transformers, embedded checkpoint, float32, CPU"


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Three rounds, not five.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Targets as one last line of JSON.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch, for both.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the tables here, as markdown.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Mixed requests.")] = 64,
    longest: Annotated[int, typer.Option(min=4, help="Most new tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=0, help="0: five, or three with --quick.")] = 0,
) -> None:
    """Measure mmengine and transformers on the same weights and prompts, in turn, in one process."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)  # read when torch and numpy are loaded, which is below
    tables, targets, lines = measure(threads, requests, longest, rounds or (3 if quick else 5))
    show(tables, lines)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(TITLE, tables, lines), encoding="utf-8")
    if json_output:
        sys.stdout.flush()
        print(target_line(targets), flush=True)


def measure(threads: int, requests: int, longest: int, rounds: int):
    """(tables, targets, lines about the machine)."""
    import torch  # after the environment is set, and after --help
    from ours import Ours
    from reference import Reference, make_inputs
    from sections import DecodeRuns, MixedRun, OneImageRun, decode_table, share_table
    from workload import mixed

    from mmengine.models.loader import resolve_folder

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        reference, ours, logged = Reference(resolve_folder(None)), Ours(), Ours(Path(folder) / "log")
        asks = mixed(ours.engine.processor, requests, longest)
        mixed_run = MixedRun(ours, logged, reference, asks, rounds)
        decodes = [DecodeRuns(ours, reference, rows, longest, 2 * rounds) for rows in DECODE_ROWS]
        one_image = OneImageRun(ours, reference, QUESTIONS, longest, rounds)
        for side in (ours, logged):
            side.answer(asks[:WARM_UP])
        for ask in asks[:WARM_UP]:
            reference.generate(make_inputs([ask.prepared]), 4)
        with _progress() as progress:

            def tick_of(section):
                task = progress.add_task(section.title, total=section.num_ticks)
                return lambda: progress.advance(task)

            mixed_table, speedup = mixed_run.run(tick_of(mixed_run))
            decode, steps = decode_table(), []
            for section in decodes:
                row, run = section.run(tick_of(section))
                decode.rows.append(row)
                steps.append(run)
            image_table, passes = one_image.run(tick_of(one_image))
        ours.close()
        logged.close()
    targets = {
        f"mixed_{requests}_vs_one_by_one": target(speedup, 3),
        f"vision_passes_{QUESTIONS}_questions": target(passes, 1, exactly=True),
    }
    return [mixed_table, decode, share_table(steps), image_table], targets, machine_lines(threads)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


if __name__ == "__main__":
    typer.run(main)

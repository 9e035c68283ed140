"""Measure LoRA adapters on a CPU: decode steps with several adapters, and waits for adapter slots.

    python -m benchmarks lora # writes benchmarks/results/lora_cpu.md, takes some minutes
    python -m benchmarks lora --quick --out lora.md # a minute; a smoke test
    python -m benchmarks lora --section waits

A decode step has 16 rows, which use 1, 4 or 16 adapters. The waiting times are simulated with mmengine's
scheduling rule and with vLLM's. The model (half_billion_model.py) is bfloat16, with 382 M weights in the text
decoder. The adapters are random, with rank 16 on all the decoder's linear layers.
"""

import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchmarks.common.measure import use_threads
from benchmarks.common.report import Part, Table, Target, machine_lines, markdown, show, target_table
from benchmarks.cpu.lora_adapters import num_bytes, write_adapter

if TYPE_CHECKING:
    from mmengine import Engine
    from mmengine.simulation import SimulationReport

RESULTS = Path(__file__).parents[1] / "results" / "lora_cpu.md"
TITLE = "LoRA adapters on a CPU"
ROWS, RANK = 16, 16
SIDES = (0, 1, 4, 16)  # adapters in a step
WANTED = 1.25  # maximum step time with 16 adapters, relative to no adapters
PROMPT, STEPS, ROUNDS = 32, 12, 5
PLACES, HOT, COLD, REQUESTS = 4, 4, 60, 3000
GAPS_MS = (30, 40, 60)  # average time between requests


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    threads: Annotated[int, typer.Option(help="Threads for torch and the kernels; 0: all.")] = 0,
    section: Annotated[Literal["all", "steps", "waits"], typer.Option(help="Section to run.")] = "all",
    out: Annotated[Path, typer.Option(help="Markdown file for the tables.")] = RESULTS,
) -> None:
    """Measure on this machine."""
    threads = threads or len(os.sched_getaffinity(0))
    use_threads(threads)
    found = Part()
    if section != "waits":
        with tempfile.TemporaryDirectory() as folder:
            found.add(steps(Path(folder), threads, 2 if quick else ROUNDS))
    if section != "steps":
        found.add(waits(REQUESTS // 10 if quick else REQUESTS))
    targets, lines = target_table(found.targets), machine_lines(threads)
    show([*found.tables, targets], lines)
    out.write_text(markdown(TITLE, [*found.tables, targets], lines), encoding="utf-8")


def steps(folder: Path, threads: int, rounds: int) -> Part:
    """Measure decode steps with ROWS rows, for each number of adapters in SIDES."""
    from benchmarks.common.half_billion_model import TEXT, cached_folder
    from mmengine import Engine, EngineConfig

    names = [f"adapter {number}" for number in range(max(SIDES))]
    loras = {name: write_adapter(folder / name, TEXT, RANK, seed) for seed, name in enumerate(names)}
    config = EngineConfig(
        spec="none",
        num_blocks=ROWS * 16,
        max_model_len=240,
        max_num_seqs=ROWS,
        num_threads=threads,
        max_loras=max(SIDES),
        enable_prefix_caching=False,
    )
    took: dict[int, list[float]] = {side: [] for side in SIDES}
    with Engine(cached_folder(), device="cpu", dtype="bfloat16", config=config, loras=loras) as engine:
        for each in range(rounds + 1):  # the first round loads the adapters and is not counted
            for side in SIDES:
                found = _decode(engine, names[:side])
                took[side] += found if each else []
    without = median(took[0])
    table = Table(
        f"A step of {ROWS} rows that decode, adapters of rank {RANK} on all linear layers",
        ("adapters", "ms", "times the step without", "MB of adapters"),
    )
    for side, found in took.items():
        size = side * num_bytes(TEXT, RANK) / 1e6
        table.rows.append(
            (str(side), f"{median(found) * 1e3:.1f}", f"{median(found) / without:.2f}", f"{size:.0f}")
        )
    ratio = median(took[max(SIDES)]) / without
    return Part([table], [Target(f"step over {max(SIDES)} adapters", ratio, WANTED, most=True)])


def _decode(engine: "Engine", names: list[str]) -> list[float]:
    """Return the durations in seconds of STEPS decode steps. Row i uses adapter i modulo len(names), or no
    adapter if `names` is empty.
    """
    from mmengine.serve.prompt.prompt import Prompt

    source, requests = random.Random(len(names)), []
    for row in range(ROWS):
        prompt = Prompt(token_ids=[source.randrange(3, 900) for _ in range(PROMPT)])
        own = {"adapter": names[row % len(names)]} if names else {}
        requests.append(
            engine.submit(prompt, max_tokens=STEPS + 8, ignore_eos=True, temperature=0.0, stream=False, **own)
        )
    while len(engine._core.state.running) < ROWS or engine.stats().num_output_tokens % ROWS:
        engine.step()
    engine.step()
    found = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - begun)
    while engine.has_work:
        engine.step()
    return found


def waits(num_requests: int) -> Part:
    """Simulate a skewed load: 9 of 10 requests use the first HOT adapters, which fill all slots."""
    title = (
        f"{num_requests} requests over {HOT + COLD} adapters, {PLACES} places: 9 of 10 are for {HOT} of them"
    )
    table, worst = Table(title, ("rule", "worst wait s", "p99 s", "p50 s", "tokens / s")), {}
    for gap_ms in GAPS_MS:
        for name, compat in (("ours", ""), ("vLLM's", "vllm")):
            report = _simulated(num_requests, gap_ms, compat)
            spread, meter = report.meter.ttft(), report.meter
            worst[name, gap_ms] = meter.longest_ttft() / 1e9
            figures = (worst[name, gap_ms], spread.p99 / 1e9, spread.p50 / 1e9)
            rate = meter.num_output_tokens / report.duration_ns * 1e9
            kind = f"{name}, a request each {gap_ms} ms"
            table.rows.append((kind, *(f"{figure:.2f}" for figure in figures), f"{rate:.0f}"))
    table.notes.append(
        "A wait lasts from a request's arrival to its first token, by the cost model for an 8B model on a "
        "GPU, with 32 rows. At the smallest gap requests arrive faster than they can be computed."
    )
    share = max(worst["ours", gap_ms] / worst["vLLM's", gap_ms] for gap_ms in GAPS_MS)
    return Part([table], [Target("worst wait, of that by vLLM's rule", share, 1.0, most=True)])


def _simulated(num_requests: int, gap_ms: int, compat: str) -> "SimulationReport":
    from mmengine.request import Adapter
    from mmengine.simulation import Driver, read_settings
    from mmengine.simulation.workload import SimRequest, Workload, generated_tokens, name_hash

    source, requests, at = random.Random(1), [], 0.0
    for number in range(num_requests):
        tag = source.randrange(HOT) if source.random() < 0.9 else HOT + source.randrange(COLD)
        at += source.expovariate(1 / (gap_ms * 1e6))  # ns
        length = source.randint(50, 400)
        requests.append(
            SimRequest(
                f"r{number}",
                length,
                lambda number=number, length=length: generated_tokens(f"r{number}", 0, length),
                source.randint(20, 200),
                int(at),
                adapter=Adapter(name_hash(f"{tag}"), 0, name=f"{tag}"),
            )
        )
    work = Workload("skewed", requests, timed=True)
    settings = read_settings({"max_loras": PLACES, "max_num_seqs": 32}, work, compat)
    return Driver(work, settings).run()


if __name__ == "__main__":
    typer.run(main)

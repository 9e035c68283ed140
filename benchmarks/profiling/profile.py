"""Profiles engine steps for `throughput.py --profile`: tables with the time per phase, and a flame graph."""

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from benchmarks.common.engine_runner import EngineRunner
from benchmarks.common.half_billion_model import cached_folder
from benchmarks.common.report import Part, Table
from benchmarks.common.workload import Ask, long_answers, mixed, random_texts
from benchmarks.cpu.half_billion import CONTEXT, PROMPT, TOKENS
from benchmarks.profiling.flame import Sampler, write
from benchmarks.profiling.forward_split import forward_split
from benchmarks.profiling.phases import ROUNDS, Clocks, Watched, least_disturbed
from mmengine.config import EngineConfig
from mmengine.serve.engine.engine import Engine

# An operation belongs to the first group with a word that occurs in the operation's name.
OPERATIONS = (
    ("linears", ("mm", "linear", "matmul")),
    ("attention", ("attention", "index_copy", "index_select", "softmax")),
    ("norms", ("norm",)),
)
ROWS = 16
DECODE_STEPS = 10  # Measured decode steps of the half-billion model.
AHEAD = 6  # Maximum number of tokens that the first rows decode while other rows are prefilled.
Watch = AbstractContextManager  # A context manager that observes the steps.


def profile(requests: int, longest: int, half_billion: bool, flame: Path) -> Part:
    """Profile the included checkpoint, write the flame graph to `flame`, and return the tables.
    `half_billion`: also profile a model with half a billion weights.
    """
    part, trees = Part(), []

    def add(title: str, ours: EngineRunner, work: Watched) -> None:
        tables, tree = _profile_one(title, ours, work)
        part.tables.extend(tables)
        trees.append(tree)
        split = forward_split(title, ours, work)
        part.tables.extend([] if split is None else [split])

    ours = EngineRunner()
    asks = long_answers(ours.engine.processor, ROWS, longest)
    mix = mixed(ours.engine.processor, requests, longest)
    title = f"Decode steps of {ROWS} rows, embedded checkpoint"
    add(title, ours, partial(_decode, ours, asks, longest))
    add(f"{len(mix)} mixed requests, embedded checkpoint", ours, partial(_answer, ours, mix))
    ours.close()
    if half_billion:
        config = EngineConfig(max_model_len=1024, max_num_seqs=ROWS, num_blocks=ROWS * 32)
        large = EngineRunner(model=cached_folder(), dtype="bfloat16", config=config)
        for rows in (1, ROWS):
            asks = random_texts(rows, CONTEXT, DECODE_STEPS + AHEAD, TOKENS)
            title = f"Decode steps of {rows} row(s), half a billion weights in bfloat16"
            add(title, large, partial(_decode, large, asks, DECODE_STEPS))
        asks = random_texts(1, PROMPT, 1, TOKENS)
        title = f"Prefill of {PROMPT} tokens, half a billion weights in bfloat16"
        add(title, large, partial(_answer, large, asks))
        large.close()
    write(flame, "Time in mmengine's steps", trees)
    return part


def _decode(ours: EngineRunner, asks: list[Ask], most: int, watch: Watch) -> None:
    running = ours.begin(asks, salt=f"profile {len(asks)}")
    running.start()
    with watch:
        running.steps(most)
    running.finish()


def _answer(ours: EngineRunner, asks: list[Ask], watch: Watch) -> None:
    with watch:
        ours.answer(asks)


def _profile_one(title: str, ours: EngineRunner, work: Watched) -> tuple[list[Table], dict]:
    """Return two tables (step phases, torch operations), and a tree for the flame graph."""
    work(nullcontext())
    clocks = least_disturbed(ours.engine, work)
    sampler = Sampler(Engine.step)
    work(sampler.running())
    watched = torch.profiler.profile(activities=[ProfilerActivity.CPU])
    work(watched)
    phases = _phase_table(title, clocks)
    return [phases, _operation_table(title, watched, clocks.num_steps)], sampler.tree(title)


def _phase_table(title: str, clocks: Clocks) -> Table:
    whole = sum(clocks.spent.values())
    table = Table(
        title,
        ("phase", "µs a step", "of the step"),
        notes=[
            f"Means of {clocks.num_steps} steps in the least disturbed of {ROUNDS} runs; a phase excludes "
            "the phases inside it."
        ],
    )
    for phase, spent in sorted(clocks.spent.items(), key=lambda item: -item[1]):
        table.rows.append((phase, f"{spent / clocks.num_steps / 1e3:.0f}", f"{spent / whole:.1%}"))
    table.rows.append(("all", f"{whole / clocks.num_steps / 1e3:.0f}", "100.0%"))
    return table


def _operation_table(title: str, watched: torch.profiler.profile, num_steps: int) -> Table:
    """Return a table of the torch operations in the steps, in groups."""
    spent: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for each in watched.key_averages():
        spent[_group(each.key)].append((each.self_cpu_time_total, each.key))
    table = Table(
        f"{title}: torch's operations",
        ("group", "µs a step", "largest"),
        notes=["Native kernels are not torch operations: this table shows only the operations around them."],
    )
    for name, group in sorted(spent.items(), key=lambda item: -_sum(item[1])):
        largest = ", ".join(
            f"{key} {taken / num_steps:.0f}" for taken, key in sorted(group, reverse=True)[:3]
        )
        table.rows.append((name, f"{_sum(group) / num_steps:.0f}", largest))
    return table


def _group(operation: str) -> str:
    names = (name for name, words in OPERATIONS if any(word in operation for word in words))
    return next(names, "everything else")


def _sum(group: list[tuple[float, str]]) -> float:
    return sum(taken for taken, _ in group)

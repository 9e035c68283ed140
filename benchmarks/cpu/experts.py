"""Compare a decode step of a mixture of experts with the time to read the step's weights from memory.

    python -m benchmarks experts # writes benchmarks/results/experts_cpu.md, some minutes, 12 GB of memory
    python -m benchmarks experts --small --out experts.md # seconds; only tests that it runs

The model has 8 GB of int8 weights. A step reads the attention weights, the head, and the experts that its
tokens use. A torch sum over 1 GiB measures the read speed between the steps. The routers are untrained.
Therefore, the benchmark also counts how many different experts the tokens use.
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.common.measure import use_threads
from benchmarks.common.report import Part, Table, Target, machine_lines, markdown, show, target_table
from benchmarks.cpu.experts_model import SIZES, SMALL, make

if TYPE_CHECKING:
    from mmengine import Engine

RESULTS = Path(__file__).parents[1] / "results" / "experts_cpu.md"
TITLE = "A mixture of experts on a CPU"
INT8 = 1 + 2 / 32  # bytes per weight: 1, and a scale of 2 bytes for 32 weights
ROUNDS, NEW, PROMPT, LONG = 3, 12, 16, 256
READ_VALUES = 2**28  # float32 values that are summed to measure the read speed
Sizes = dict[str, Any]


def main(
    small: Annotated[bool, typer.Option("--small", help="Use a model with a few thousand weights.")] = False,
    threads: Annotated[int, typer.Option(help="Threads for torch and the kernels; 0: all.")] = 0,
    out: Annotated[Path, typer.Option(help="Markdown file for the tables.")] = RESULTS,
) -> None:
    """Measure on this machine."""
    threads = threads or len(os.sched_getaffinity(0))
    use_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        sizes = SMALL if small else SIZES
        make(model, sizes)
        engine, found = _loaded(model, sizes, threads)
        found.add(_steps(engine, sizes, threads))
    targets, lines = target_table(found.targets), machine_lines(threads)
    show([*found.tables, targets], lines)
    out.write_text(markdown(TITLE, [*found.tables, targets], lines), encoding="utf-8")


def _values(s: Sizes) -> tuple[int, int, int]:
    """Return the number of weights in one expert, in a layer's attention, and in the head."""
    hidden = s["hidden_size"]
    heads = 2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]
    return 3 * hidden * s["moe_intermediate_size"], heads * s["head_dim"] * hidden, s["vocab_size"] * hidden


def _loaded(model: Path, sizes: Sizes, threads: int) -> tuple["Engine", Part]:
    """Return the engine, and a table with its loading time and memory."""
    import torch

    from benchmarks.cpu.day_one_side import Peaks, status
    from mmengine import Engine, EngineConfig

    config = EngineConfig(
        spec="none", num_blocks=160, max_model_len=640, num_threads=threads, quantize="int8"
    )
    torch.ones(8) @ torch.ones(8)  # start torch's threads
    before, peaks, begun = status("RssAnon"), Peaks(), time.perf_counter()
    engine = Engine(model, device="cpu", dtype="bfloat16", config=config)
    took = time.perf_counter() - begun
    peaks.end()
    expert, attention, head = _values(sizes)
    layers, peak = sizes["num_hidden_layers"], peaks.private - before
    experts = layers * sizes["num_experts"] * expert * INT8
    held = experts + layers * attention * INT8 + head * (INT8 + 2)  # int8 head, bfloat16 embedding
    table = Table(
        f"Loading, {layers} layers, bfloat16 to int8",
        ("experts, held, GB", "all, held, GB", "most private memory, GB", "of what is held", "s"),
        [(*(f"{size / 1e9:.2f}" for size in (experts, held, peak)), f"{peak / held:.2f}", f"{took:.0f}")],
        ["Private memory above that of the process before loading."],
    )
    return engine, Part(
        [table], [Target("most memory of loading, of what is held", peak / held, 1.1, most=True)]
    )


def _steps(engine: "Engine", sizes: Sizes, threads: int) -> Part:
    import torch

    values = torch.randn(READ_VALUES)
    times: dict[str, list[float]] = {"read": [], "1": [], "4": [], "16": [], "prompt": []}
    hit: dict[str, list[int]] = {"1": [], "4": [], "16": []}
    seen: set[tuple[int, int]] = set()
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        values.sum()
        times["read"].append((time.perf_counter() - begun) / values.nbytes)
        for rows in (1, 4, 16):
            for took, experts in _decoded(engine, rows):
                times[str(rows)].append(took)
                hit[str(rows)].append(len(experts))
                if rows == 1:
                    seen |= experts
        _submit(engine, 1, LONG, 1)
        begun = time.perf_counter()
        _run(engine)
        times["prompt"].append(time.perf_counter() - begun)
    engine.close()
    read, prompt = median(times["read"]), median(times["prompt"])
    expert, attention, head = _values(sizes)
    layers = sizes["num_hidden_layers"]
    table = Table(
        f"Steps, {threads} thread{'s' * (threads > 1)}",
        ("rows", "distinct experts a layer", "MB read", "ms", "of one read", "tokens a second"),
    )
    shares = {}
    for rows in ("1", "4", "16"):
        size = (layers * attention + head + median(hit[rows]) * expert) * INT8
        size += layers * 2 * sizes["hidden_size"] * sizes["num_experts"]  # routers
        shares[rows], took = size * read / median(times[rows]), median(times[rows])
        table.rows.append(
            (
                rows,
                f"{median(hit[rows]) / layers:.1f}",
                f"{size / 1e6:,.0f}",
                f"{took * 1e3:.1f}",
                f"{shares[rows]:.2f}",
                f"{int(rows) / took:.1f}",
            )
        )
    table.notes += [
        f"Memory is read at {1e-9 / read:.1f} GB/s by a torch sum in the same rounds.",
        f"Over {len(times['1'])} tokens of one row {len(seen) / layers:.1f} experts a layer were taken, of "
        f"{sizes['num_experts']}; a token takes {sizes['num_experts_per_tok']}.",
        f"A prompt of {LONG} tokens takes {prompt:.2f} s, {LONG / prompt:.0f} tokens a second.",
    ]
    return Part([table], [Target("one row: share of a read of its bytes", shares["1"], 0.7)])


def _decoded(engine: "Engine", rows: int) -> Iterator[tuple[float, set[tuple[int, int]]]]:
    """Yield (seconds, {(layer, used expert)}) for each step in which all rows decode."""
    counters = engine.built.executor._runner._model._text.experts  # type: ignore[attr-defined]  # native layers
    _submit(engine, rows, PROMPT, NEW)
    decoding = False
    while engine.has_work:
        before = [each.hits.copy() for each in counters]
        begun = time.perf_counter()
        count = sum(len(output.token_ids) for output in engine.step())
        took = time.perf_counter() - begun
        if decoding and count == rows:
            changed = [(now.hits - then).nonzero()[0] for now, then in zip(counters, before, strict=True)]
            yield took, {(layer, int(i)) for layer, each in enumerate(changed) for i in each}
        decoding = count == rows


def _run(engine: "Engine") -> None:
    while engine.has_work:
        engine.step()


def _submit(engine: "Engine", rows: int, length: int, new: int) -> None:
    from mmengine.serve.prompt.prompt import Prompt

    most = engine.processor.tokenizer.vocab_size
    for _ in range(rows):
        prompt = [random.randrange(most // 4, most) for _ in range(length)]
        engine.submit(Prompt(token_ids=prompt), max_tokens=new, ignore_eos=True)


if __name__ == "__main__":
    typer.run(main)

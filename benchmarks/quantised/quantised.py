"""Measure speed and memory of quantised weights on a CPU, and compare them with bfloat16 weights.

    python -m benchmarks quantised    # writes benchmarks/results/quantised_cpu*.md, takes twenty minutes
    python -m benchmarks quantised --shape small --quick    # a minute
    python -m benchmarks quantised --kept FOLDER --shape "0.4 B" --threads 1    # one part, stored in FOLDER

The benchmark times steps with 1 and 16 rows, and a prompt. A step with 1 row is also compared with the time
to read the weights once. All engines for a model size stay in memory. Each round runs the engines in a new
random order. Each figure is the median over the rounds.
"""

import enum
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.report import Part, Table, Target, machine_lines, markdown, show, target_table

if TYPE_CHECKING:  # imported only after the number of threads is set
    from mmengine import Engine

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results"
# file names by instruction set; other instruction sets use quantised_cpu.md
FILES = {"avx2": "quantised_cpu_avx2.md"}
TITLE = "Quantised weights on a CPU"
# A request for timed steps has PROMPT prompt tokens and NEW generated tokens. The timed prompt has LONG
# tokens.
NEW, PROMPT, LONG = 8, 32, 512
# In this format, the engine quantises all weights at loading, including the LM head. The hub's FP8 folders
# have an unquantised head.
WHOLE = "FP8 16 x 128, head too"
FORMS = ("bf16", "int8 g 32", "FP8 128 x 128", WHOLE, "int4 g 128")
# formats that the engine makes from the bfloat16 folder at loading, with their `quantize` setting
MADE = {"int8 g 32": "int8", WHOLE: "fp8"}
# suffix of a format's name if activations are rounded to int8
ROUNDED = ", int8 activations"
WANTED = {
    "int8 g 32": (1.7, 0.80),
    "FP8 128 x 128": (1.7, 0.75),
    WHOLE: (1.7, 0.75),
    "int4 g 128": (2.4, 0.60),
}
BYTES = {
    "bf16": 2.0,
    "int8 g 32": 1 + 2 / 32,
    "FP8 128 x 128": 1 + 4 / 128,
    WHOLE: 1 + 4 / 128,
    "int4 g 128": 0.5 + 2 / 128,
}
READ_VALUES = 2**28  # number of float32 values that are summed to measure the memory's read rate


class Shape(enum.StrEnum):
    SMALL = "small"
    HALF = "0.4 B"
    TWO = "2 B"


def main(
    shape: Annotated[
        list[Shape] | None, typer.Option(help="Model sizes to measure (default: 0.4 B, 2 B).")
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(help="Threads for torch (default: 1, then all).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    kept: Annotated[
        Path | None, typer.Option(help="Folder for finished parts, which are not measured again.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file for the tables.")] = None,
) -> None:
    """Measure quantised weights on this machine."""
    from mmengine.native.cpu import usable_isas

    counts = threads or sorted({1, len(os.sched_getaffinity(0))})
    shapes, isa = shape or [Shape.HALF, Shape.TWO], usable_isas()[0]
    if out is None and not shape and not quick and not threads:
        out = RESULTS / FILES.get(isa, "quantised_cpu.md")
    found = Part()
    with tempfile.TemporaryDirectory() as temporary:
        for each in shapes:
            place = (kept or Path(temporary)) / each.name
            place.mkdir(parents=True, exist_ok=True)
            folders = _folders(each, place)
            parts = {"loading": partial(_memory, each, folders)}
            parts |= {f"{n} threads": partial(_times, each, folders, n, 3 if quick else 5) for n in counts}
            for name, part in parts.items():
                found.add(made := _once(place / f"{name}.json", part))
                show(made.tables, [])
    targets, lines = target_table(found.targets), [*machine_lines(max(counts)), f"Kernels: {isa}"]
    show([targets], lines)
    if out is not None:
        out.write_text(markdown(TITLE, [*found.tables, targets], lines), encoding="utf-8")


def _once(path: Path, part: Callable[[], Part]) -> Part:
    """Return the results in the file `path`. If the file is missing, measure and write the results first."""
    if not path.exists():
        path.write_text(part().dumps())
    return Part.loads(path.read_text())


def _folders(shape: Shape, folder: Path) -> dict[str, Path]:
    """Return the checkpoint folder for each format. Missing folders are written."""
    from benchmarks.common import half_billion_model
    from benchmarks.common import large_model as day_one_model
    from benchmarks.quantised.folders import quantised

    if shape is Shape.HALF:
        plain = half_billion_model.cached_folder()
    else:
        plain = folder / "bf16"
        if not plain.exists():
            day_one_model.make(plain, None, small=shape is Shape.SMALL)
    fp8, int4 = (quantised(plain, folder / form, form) for form in ("fp8", "int4"))
    return dict(zip(FORMS, (plain, plain, fp8, plain, int4), strict=True))


def _memory(shape: Shape, folders: dict[str, Path]) -> Part:
    """Measure the peak memory during loading, in a new process for each format."""
    from benchmarks.quantised.folders import weight_bytes

    table = Table(f"{shape}: loading", ("", "files, MB", "most private memory, MB", "of the files", "s"))
    targets = []
    for form, folder in folders.items():
        command = [sys.executable, str(BENCHMARKS), "quantised.loading", str(folder)]
        more = ["--quantize", MADE[form]] if form in MADE else []
        said = subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout
        found, size = json.loads(said.splitlines()[-1]), weight_bytes(folder)
        peak = found["weights"] / size
        table.rows.append(
            (form, f"{size / 1e6:,.0f}", f"{found['weights'] / 1e6:,.0f}", f"{peak:.2f}", f"{found['s']:.1f}")
        )
        if form == "FP8 128 x 128":
            targets.append(Target(f"{shape}: peak of loading FP8, of its files", peak, 1.1, most=True))
    table.notes.append(
        "Private memory above that of the process before loading; the KV pool is not written yet."
    )
    return Part([table], targets)


def _times(shape: Shape, folders: dict[str, Path], threads: int, rounds: int) -> Part:
    import torch

    gc.collect()  # frees earlier engines, which are in reference cycles
    values = torch.randn(READ_VALUES // (16 if shape is Shape.SMALL else 1))
    named = {name: folder for form, folder in folders.items() for name in _names(form, shape)}
    engines = {form: _engine(folder, form, threads) for form, folder in named.items()}
    torch.set_num_threads(threads)
    work: dict[str, Callable[[], float]] = {"read": lambda: _clocked(values.sum) / values.nbytes}
    for form, engine in engines.items():
        for rows in (1, 16):
            work[f"{form}/{rows}"] = lambda engine=engine, rows=rows: _step_s(engine, rows)
        work[f"{form}/prompt"] = lambda engine=engine: _prompt_s(engine)
    chance, took = random.Random(21), {name: list[float]() for name in work}
    for _ in range(rounds):
        for name in chance.sample(list(work), len(work)):
            took[name].append(work[name]())
    found = {name: median(each) for name, each in took.items()}
    table = Table(
        f"{shape}: steps, {threads} thread{'s' * (threads > 1)}",
        (
            "",
            "MB a token",
            "1 row, ms",
            "share of a read",
            "of bf16",
            "16 rows, ms",
            "of bf16",
            f"prompt of {LONG}, ms",
            "of bf16",
        ),
    )
    targets = []
    for form, engine in engines.items():
        size = _token_bytes(engine, form)
        one, many, prompt = (found[f"{form}/{kind}"] for kind in (1, 16, "prompt"))
        ratios = [found[f"bf16/{kind}"] / found[f"{form}/{kind}"] for kind in (1, 16, "prompt")]
        share = size * found["read"] / one
        cells = (
            f"{size / 1e6:,.0f} {one * 1e3:.1f} {share:.2f} {ratios[0]:.2f} {many * 1e3:.1f} {ratios[1]:.2f}"
        )
        table.rows.append((form, *cells.split(), f"{prompt * 1e3:.0f}", f"{ratios[2]:.2f}"))
        if form in WANTED:
            speed, least = WANTED[form]
            of = f"{shape}, {threads} thread{'s' * (threads > 1)}, {form}"
            targets += [
                Target(f"{of}: 1 row, bf16's speed", ratios[0], speed),
                Target(f"{of}: share of a read", share, least),
                Target(f"{of}: 16 rows", ratios[1], 1.0),
                Target(f"{of}: prompt", ratios[2], 1.0),
            ]
        engine.close()
    table.notes.append(
        f"Memory is read at {1e-9 / found['read']:.1f} GB/s by a torch sum in the same rounds."
    )
    return Part([table], targets)


def _names(form: str, shape: Shape) -> list[str]:
    """Return the names of the format's engines. For an integer format, a second engine rounds activations to
    int8. The 2 B model has no second engine, because memory does not suffice.
    """
    return [form, form + ROUNDED] if form.startswith("int") and shape is not Shape.TWO else [form]


def _engine(folder: Path, form: str, threads: int) -> "Engine":
    from mmengine import Engine, EngineConfig

    config = EngineConfig(
        spec="none",
        num_blocks=160,
        max_model_len=640,
        encoder_cache_size=1024,
        num_threads=threads,
        quantize=MADE.get(form.removesuffix(ROUNDED), "none"),
        activations="int8" if form.endswith(ROUNDED) else "model",
    )
    return Engine(folder, device="cpu", dtype="bfloat16", config=config)


def _token_bytes(engine: "Engine", form: str) -> float:
    """Return the layers' and the head's weight bytes in memory. A step with one row reads each byte once."""
    built = engine.built
    config = built.plugin.read_config(built.folder).text  # type: ignore[attr-defined]  # a DescribedPlugin
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = (heads + config.num_heads) * config.head_dim + 3 * config.intermediate_size
    form = form.removesuffix(ROUNDED)
    layers, head = config.num_layers * layer * config.hidden_size, config.vocab_size * config.hidden_size
    return layers * BYTES[form] + head * (BYTES[form] if form in MADE else 2.0)


def _clocked(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _step_s(engine: "Engine", rows: int) -> float:
    """Return the median duration of a decode step in seconds. Each call uses new random prompts."""
    took = []
    _submit(engine, rows, PROMPT, NEW)
    while engine.has_work:
        begun = time.perf_counter()
        if sum(len(output.token_ids) for output in engine.step()) == rows:
            took.append(time.perf_counter() - begun)
    return median(took[1:])


def _prompt_s(engine: "Engine") -> float:
    _submit(engine, 1, LONG, 1)
    begun = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begun


def _submit(engine: "Engine", rows: int, length: int, new: int) -> None:
    from mmengine.serve.prompt.prompt import Prompt

    most = min(50_000, engine.processor.tokenizer.vocab_size // 2)
    for _ in range(rows):
        prompt = [random.randrange(300, most) for _ in range(length)]
        engine.submit(Prompt(token_ids=prompt), max_tokens=new, ignore_eos=True)


if __name__ == "__main__":
    typer.run(main)

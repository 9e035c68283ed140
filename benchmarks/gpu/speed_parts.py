"""Speed measurements of the GPU check, with random weights. Each time is compared with a lower bound.

Not yet run on a GPU.
"""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.drafts import chain_seconds, pass_bytes
from benchmarks.gpu.roofline import Goal, Rates, decode_bytes, measure_rates, prefill_flops, vision_flops
from benchmarks.gpu.run import PartReporter, Run
from benchmarks.gpu.shapes import SHAPES, random_model, reduced
from benchmarks.gpu.speed import Bench, Sizes
from mmengine.errors import ConfigError
from mmengine.request import SamplingParams
from mmengine.spec_decode.eagle3.config import MAX_DRAFTS
from mmengine_qwen3_vl.config import ModelConfig

SIZES = Sizes(rows=(1, 16, 64, 256), context=1024, steps=48, budget=8192, prefill=8192, grid=(1, 64, 64))
DRY = Sizes(rows=(1, 8), context=24, steps=4, budget=32, prefill=64, grid=(1, 4, 4))
# Goals, which are minimum values. WANTED_DECODE (keyed by rows) and WANTED_PREFILL: the quotient (lower bound
# for the time) / (measured time). WANTED_BUSY: the share of the time with a running kernel.
WANTED_DECODE = {1: 0.7, 64: 0.6, 256: 0.6}
WANTED_PREFILL = 0.55
WANTED_BUSY = 0.97


def rates(tell: PartReporter) -> None:
    found = measure_rates(tell.device, tell.dry)
    tell.fact("copy_gb_per_s", found.copy / 1e9)
    tell.fact("matmul_tflops", found.matmul / 1e12)


def _rates(facts: dict[str, object]) -> Rates:
    if "matmul_tflops" not in facts:
        raise ConfigError("the device's rates are unknown, so there are no lower bounds")
    return Rates(facts["copy_gb_per_s"] * 1e9, facts["matmul_tflops"] * 1e12)


def shape_and_sizes(name: str, dry: bool) -> tuple[ModelConfig, Sizes]:
    """Return a model's shape, and the batch sizes and lengths to measure."""
    return (reduced(SHAPES[name]), DRY) if dry else (SHAPES[name], SIZES)


def decode(name: str, facts: dict[str, object], tell: PartReporter) -> None:
    """Measure greedy decode for each batch size. Then measure 64 rows with top-k and top-p, and with top-p
    alone.

    Sampling does not change the lower bound.
    """
    found, (shape, sizes) = _rates(facts), shape_and_sizes(name, tell.dry)
    network = random_model(shape, tell.device, torch.bfloat16)
    tell.fact("layer operations", getattr(getattr(network._text, "ops", None), "by", "the CPU's kernels"))
    bench = Bench(network, tell.device, torch.bfloat16, max(sizes.rows), sizes)
    tell.fact("attention", bench.attention)
    some = sizes.rows[-1] if tell.dry else 64
    asked = [(rows, f"context {sizes.context}", None, WANTED_DECODE.get(rows)) for rows in sizes.rows]
    for top_k, how in ((20, "top-k 20, top-p 0.8"), (0, "top-p 0.8")):
        asked.append((some, how, SamplingParams(temperature=0.7, top_p=0.8, top_k=top_k), None))
    for rows, how, params, wanted in asked:
        step = bench.decode(rows, sizes.steps, sampling=params)
        floor = decode_bytes(shape, rows, step.context) / found.copy
        tell.goal(f"{name} decode x{rows}, {how}", Goal.of_time(step.step_s, floor, wanted))
        tell.fact(f"{name} decode x{rows}, {how}: CPU ms a step", round(step.cpu_s * 1e3, 3))
    tell.fact(f"{name} steps replayed, and not, by why", bench.graph_counts.get("steps", {}))


def drafts(name: str, facts: dict[str, object], tell: PartReporter) -> None:
    """Measure MAX_DRAFTS successive drafts for one row, with a draft head of random weights."""
    found, (shape, sizes) = _rates(facts), shape_and_sizes(name, tell.dry)
    floor = MAX_DRAFTS * pass_bytes(shape) / found.copy
    try:
        for how, seconds in chain_seconds(shape, tell.device, torch.bfloat16, sizes.context).items():
            tell.goal(f"{name} {MAX_DRAFTS} drafts x1, {how}", Goal.of_time(seconds, floor, None))
    except ConfigError as error:
        tell.skip(f"{name} drafts", str(error))


def prompts(name: str, facts: dict[str, object], tell: PartReporter) -> None:
    found, (shape, sizes) = _rates(facts), shape_and_sizes(name, tell.dry)
    network = random_model(shape, tell.device, torch.bfloat16)
    packs = getattr(network._vision, "ops", None) is not None
    tell.fact("attention of images", "one call" if packs else "the CPU's" if tell.dry else "by frame lengths")
    bench = Bench(network, tell.device, torch.bfloat16, 1, replace(sizes, context=sizes.prefill))
    floor = prefill_flops(shape, sizes.prefill) / found.matmul
    goal = Goal.of_time(bench.prefill(sizes.prefill), floor, WANTED_PREFILL)
    tell.goal(f"{name} prefill of {sizes.prefill}", goal)
    for count in (1, 8):
        floor = count * vision_flops(shape, sizes.grid) / found.matmul
        embeds = sizes.grid[0] * sizes.grid[1] * sizes.grid[2] // 4
        goal = Goal.of_time(bench.encode([sizes.grid] * count), floor, None)
        tell.goal(f"{name} vision, {count} image(s) of {embeds} tokens", goal)
    for grid in sizes.small_grids:
        floor = vision_flops(shape, grid) / found.matmul
        for how, seconds in bench.encode_small(grid).items():
            of = f"{name} vision, {grid[1] * grid[2] // 4} tokens {how}"
            tell.goal(of, Goal.of_time(seconds, floor, None))


def invariant(name: str, facts: dict[str, object], tell: PartReporter) -> None:
    """With batch_invariant, measure a decode step with 64 rows, and the prefill for a long prompt."""
    found, (shape, sizes) = _rates(facts), shape_and_sizes(name, tell.dry)
    try:
        network = random_model(shape, tell.device, torch.bfloat16, batch_invariant=True)
        bench = partial(Bench, network, tell.device, torch.bfloat16, batch_invariant=True)
        rows = sizes.rows[-1] if tell.dry else 64
        step = bench(rows, sizes).decode(rows, sizes.steps)
        floor = decode_bytes(shape, rows, step.context) / found.copy
        tell.goal(f"{name} decode x{rows}, batch_invariant", Goal.of_time(step.step_s, floor, None))
        seconds = bench(1, replace(sizes, context=sizes.prefill)).prefill(sizes.prefill)
        floor = prefill_flops(shape, sizes.prefill) / found.matmul
        tell.goal(f"{name} prefill of {sizes.prefill}, batch_invariant", Goal.of_time(seconds, floor, None))
    except ConfigError as error:
        tell.skip(f"{name} with batch_invariant", str(error))


def compare_invariant_times(run: Run, name: str) -> None:
    """For each goal, record the time with batch_invariant divided by the time without batch_invariant."""
    context = shape_and_sizes(name, run.dry)[1].context
    for key, goal in run.goals.items():
        work, _, how = key.partition(", ")
        without = run.goals.get(f"{work}, context {context}") or run.goals.get(work)
        if key.startswith(name) and how == "batch_invariant" and without is not None:
            run.facts[f"{key}, times as long"] = round(goal.measured / without.measured, 2)


def idle(name: str, tell: PartReporter) -> None:
    if tell.dry:
        tell.skip(f"{name} GPU idle in decode", "a CPU has no timeline of kernels")
        return
    from benchmarks.gpu.idle import Idle

    network = random_model(SHAPES[name], tell.device, torch.bfloat16)
    bench, watch = Bench(network, tell.device, torch.bfloat16, 64, SIZES), Idle()
    bench.decode(64, SIZES.steps, watch)
    goal = Goal(watch.share, 1 - WANTED_BUSY, 1 - watch.share, WANTED_BUSY, "of the time")
    tell.goal(f"{name} GPU idle in decode x64", goal)

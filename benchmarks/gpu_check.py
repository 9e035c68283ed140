"""Called by gpu.sh: what `--device cuda` computes is right, and how near it comes to what the device can do.

Not yet run on a GPU.
"""

import argparse
import gc
import json
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch
from gpu_floors import Goal, Rates, decode_bytes, measure_rates, prefill_flops, vision_flops
from gpu_graphs import compare_graphs
from gpu_kernels import compare_layers, compare_sampling
from gpu_shapes import SHAPES, random_model, reduced
from gpu_speed import Bench, Sizes
from gpu_tokens import Verdict, compare_backends, compare_tokens, compare_transformers
from report import Table, show
from workload import random_texts

from mmengine.errors import ConfigError, in_one_line
from mmengine.gpu import sampling
from mmengine.request import SamplingParams
from mmengine.version import __version__
from mmengine_qwen3_vl.config import ModelConfig

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = Sizes(rows=(1, 16, 64, 256), context=1024, steps=48, budget=8192, prefill=8192, grid=(1, 64, 64))
DRY = Sizes(rows=(1, 8), context=24, steps=4, budget=32, prefill=64, grid=(1, 4, 4))
# Of the floor, or of the matmul rate; of transformers' rate; of the time that kernels run.
WANTED_DECODE = {1: 0.7, 64: 0.6, 256: 0.6}
WANTED_PREFILL = 0.55
WANTED_CONTINUOUS, WANTED_GENERATE = 5.0, 8.0
WANTED_BUSY = 0.97


@dataclass(slots=True)
class Run:
    """What is asked for, and what was found so far."""

    dry: bool
    ends: float  # time.monotonic() at which nothing new begins
    facts: dict[str, object]
    out: Path | None
    goals: dict[str, Goal] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def part(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Do `work`, which takes about so long on an H100, if there is time; what it raises ends it alone."""
        left = self.ends - time.monotonic()
        if left < seconds:
            self.skipped[name] = f"{left:.0f} s are left, and it takes about {seconds:.0f}"
            return
        print(f"{name} …", flush=True)
        try:
            work()
        except Exception as error:  # a part that cannot run must not cost the others
            self.failed = True
            self.skipped[name] = in_one_line(error)
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
        self.write()

    def write(self) -> None:
        """After every part: a run that is cut off leaves what it found."""
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, object]:
        targets = {name: goal.as_dict() for name, goal in self.goals.items()}
        checks = {
            one.name: {"right": one.right, "said": one.said, "notes": one.notes} for one in self.verdicts
        }
        return self.facts | {"checks": checks, "targets": targets, "skipped": self.skipped}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure --device cuda.")
    parser.add_argument("--dry-run", action="store_true", help="everything on the CPU, few and small")
    parser.add_argument("--seconds", type=float, default=470.0, help="after which no further part begins")
    parser.add_argument("--out", type=Path, help="where the JSON goes; results/gpu_<device>.json beside this")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU here: run this where it does, or with --dry-run", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    run = begin(options)
    try:
        correctness(run)
        speed(run)
    except KeyboardInterrupt:
        run.failed, run.skipped["what was still to come"] = True, "cut off by a signal"
        run.write()
    show(tables(run), [f"skipped: {name}: {why}" for name, why in run.skipped.items()])
    if run.out is None:
        print("dry run: nothing is written; not yet run on a GPU")
    else:
        print(f"written: {run.out}")
    return 1 if run.failed or not all(one.right for one in run.verdicts) else 0


def begin(options: argparse.Namespace) -> Run:
    dry = options.dry_run
    name = "cpu (dry run)" if dry else torch.cuda.get_device_name()
    out = options.out
    if out is None and not dry:
        out = RESULTS / f"gpu_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"
    facts = {
        "device": name,
        "date": str(date.today()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mmengine": __version__,
        "sampling": sampling.describe(torch.device("cpu" if dry else "cuda")),
    }
    print(
        f"{name}: correctness, then speed of random weights; ends within {options.seconds:.0f} s; TF32 is off"
    )
    return Run(dry, time.monotonic() + options.seconds, facts, out)


def correctness(run: Run) -> None:
    count = 4 if run.dry else 24
    run.part("attention backends", 20, lambda: backends(run))
    run.part("kernels", 20, lambda: kernels(run))
    run.part("captured steps", 30, lambda: captured(run))
    run.part("tokens", 60, lambda: run.verdicts.extend(compare_tokens(run.device, count)))
    run.part(
        "tokens beside transformers",
        60,
        lambda: run.verdicts.append(compare_transformers(run.device, count)),
    )


def backends(run: Run) -> None:
    dtype = torch.float32 if run.dry else torch.bfloat16
    verdicts, skipped = compare_backends(run.device, dtype, 4 if run.dry else 16)
    run.verdicts += verdicts
    run.skipped |= skipped


def kernels(run: Run) -> None:
    dtype = torch.float32 if run.dry else torch.bfloat16
    run.verdicts.append(compare_layers(run.device, dtype, run.dry))
    run.verdicts.append(compare_sampling(run.device, *((20, 300) if run.dry else (500, 151_936))))


def captured(run: Run) -> None:
    dtype = torch.float32 if run.dry else torch.bfloat16
    try:
        run.verdicts.append(compare_graphs(run.device, dtype))
    except ConfigError as error:
        run.skipped["captured steps"] = str(error)


def speed(run: Run) -> None:
    found: list[Rates] = []
    run.part("rates of the device", 5, lambda: found.append(measure_rates(run.device, run.dry)))
    if not found:
        return
    rates = found[0]
    run.facts["copy_gb_per_s"], run.facts["matmul_tflops"] = rates.copy / 1e9, rates.matmul / 1e12
    run.part("2B", 60, lambda: one_shape(run, "2B", rates))
    run.part("transformers at 2B", 120, lambda: beside_transformers(run, "2B"))
    run.part("8B", 90, lambda: one_shape(run, "8B", rates))


def one_shape(run: Run, name: str, rates: Rates) -> None:
    shape, sizes = (reduced(SHAPES[name]), DRY) if run.dry else (SHAPES[name], SIZES)
    network = random_model(shape, run.device, torch.bfloat16)
    run.facts["layer operations"] = getattr(getattr(network._text, "ops", None), "by", "the CPU's kernels")
    packs = getattr(network._vision, "ops", None) is not None
    run.facts["attention of images"] = "one call" if packs else "the CPU's" if run.dry else "by frame lengths"
    bench = Bench(network, run.device, torch.bfloat16, max(sizes.rows), sizes)
    run.facts["attention"] = bench.attention
    for rows in sizes.rows:
        bench.decode(rows, 2)  # builds what this batch needs
        found = bench.decode(rows, sizes.steps)
        floor = decode_bytes(shape, rows, found.context) / rates.copy
        goal = Goal.of_time(found.step_s, floor, WANTED_DECODE.get(rows))
        run.goals[f"{name} decode x{rows}, context {sizes.context}"] = goal
        run.facts[f"{name} decode x{rows} CPU ms a step"] = round(found.cpu_s * 1e3, 3)
    sampled_decode(run, name, bench, rates, shape)
    if run.dry:
        run.skipped[f"{name} GPU idle in decode"] = "a CPU has no timeline of kernels"
    elif 64 in sizes.rows:
        run.goals[f"{name} GPU idle in decode x64"] = idle(bench, sizes)
    run.facts[f"{name} steps replayed, and not, by why"] = bench.graph_steps
    bench.close()
    bench = Bench(network, run.device, torch.bfloat16, 1, replace(sizes, context=sizes.prefill))
    floor = prefill_flops(shape, sizes.prefill) / rates.matmul
    goal = Goal.of_time(bench.prefill(sizes.prefill), floor, WANTED_PREFILL)
    run.goals[f"{name} prefill of {sizes.prefill}"] = goal
    for count in (1, 8):
        floor = count * vision_flops(shape, sizes.grid) / rates.matmul
        embeds = sizes.grid[0] * sizes.grid[1] * sizes.grid[2] // 4
        goal = Goal.of_time(bench.encode([sizes.grid] * count), floor, None)
        run.goals[f"{name} vision, {count} image(s) of {embeds} tokens"] = goal
    bench.close()


def sampled_decode(run: Run, name: str, bench: Bench, rates: Rates, shape: ModelConfig) -> None:
    """What top-k with top-p costs, and top-p alone, beside the same floor."""
    sizes = DRY if run.dry else SIZES
    rows = sizes.rows[-1] if run.dry else 64
    for top_k in (20, 0):
        sampling = SamplingParams(temperature=0.7, top_p=0.8, top_k=top_k)
        bench.decode(rows, 2, sampling=sampling)
        found = bench.decode(rows, sizes.steps, sampling=sampling)
        floor = decode_bytes(shape, rows, found.context) / rates.copy
        how = "top-k 20, top-p 0.8" if top_k else "top-p 0.8"
        run.goals[f"{name} decode x{rows}, {how}"] = Goal.of_time(found.step_s, floor, None)


def idle(bench: Bench, sizes: Sizes) -> Goal:
    from gpu_idle import Idle

    watch = Idle()
    bench.decode(64, sizes.steps, watch)
    return Goal(watch.share, 1 - WANTED_BUSY, 1 - watch.share, WANTED_BUSY, "of the time")


def beside_transformers(run: Run, name: str) -> None:
    """The same requests on both sides, one side after the other: each has the device to itself."""
    from gpu_rival import continuous_rate, generate_rate, image_asks, rival_model

    shape = reduced(SHAPES[name]) if run.dry else SHAPES[name]
    texts, images, tokens, num_new = (4, 2, 12, 4) if run.dry else (64, 32, 32, 128)
    prompt, grid = (16, (1, 4, 4)) if run.dry else (512, (1, 32, 32))
    text_asks = random_texts(texts, prompt, num_new, shape.text.vocab_size)
    asks = image_asks(shape, images, grid, tokens, num_new)
    network = random_model(shape, run.device, torch.bfloat16)
    longest = prompt + num_new if run.dry else 1024  # an image's prompt with its answer fits too
    sizes = replace(DRY if run.dry else SIZES, context=longest)
    bench = Bench(network, run.device, torch.bfloat16, texts, sizes)
    ours = bench.answer(text_asks), bench.answer(asks)
    bench.close()
    del network, bench
    gc.collect()
    rival = rival_model(shape, run.device, torch.bfloat16)
    generated = max(generate_rate(rival, asks[: images // 8 or 1], 1), generate_rate(rival, asks, 16))
    goal = Goal.of_rival(ours[1], generated, WANTED_GENERATE)
    run.goals[f"{name} {images} image requests beside generate, one by one or padded"] = goal
    goal = Goal.of_rival(ours[0], continuous_rate(rival, text_asks), WANTED_CONTINUOUS)
    run.goals[f"{name} {texts} text requests beside continuous batching"] = goal


def tables(run: Run) -> list[Table]:
    checks = Table("Correctness", ("", "found", "right"))
    for one in run.verdicts:
        checks.rows.append((one.name, one.said, "yes" if one.right else "NO"))
        checks.notes += one.notes
    goals = Table(
        f"Speed on {run.facts['device']}",
        ("", "measured", "floor or rival", "fraction", "wanted", "met"),
    )
    for name, goal in run.goals.items():
        met = "" if goal.met is None else "yes" if goal.met else "NO"
        wanted = "" if goal.wanted is None else f"{goal.wanted:g}"
        figures = f"{goal.measured:.4g} {goal.unit}", f"{goal.floor:.4g}", f"{goal.fraction:.3f}"
        goals.rows.append((name, *figures, wanted, met))
    for name in ("copy_gb_per_s", "matmul_tflops"):
        if name in run.facts:
            goals.notes.append(f"{name.replace('_', ' ')}: {run.facts[name]:.1f}")
    for name in ("attention", "attention of images", "layer operations", "sampling"):
        goals.notes.append(f"{name} by: {run.facts.get(name, 'unknown')}")
    if run.dry:
        goals.notes.append("These sizes say nothing about a GPU, nor about this CPU.")
    goals.notes += [f"{name}: {value}" for name, value in run.facts.items() if name[:3] in ("2B ", "8B ")]
    return [checks, goals]


if __name__ == "__main__":
    sys.exit(main())

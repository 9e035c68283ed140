"""The parts of gpu_check.py, each for a process of its own: what they find they tell at once.

Not yet run on a GPU.
"""

import importlib.util
import platform
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from gpu_bits import compare_bits
from gpu_drafts import chain_seconds, compare_chains, pass_bytes
from gpu_floors import Goal, Rates, decode_bytes, measure_rates, prefill_flops, vision_flops
from gpu_graphs import compare_encoder_graphs, compare_graphs
from gpu_kernels import compare_layers, compare_sampling
from gpu_rival import attention_of, continuous_rates, generate_rate, image_asks, rival_model
from gpu_run import Run, Teller, Work
from gpu_shapes import SHAPES, random_model, reduced
from gpu_speed import Bench, Sizes
from gpu_tokens import Verdict, compare_backends, compare_tokens, compare_transformers
from gpu_wide import compare_wide
from workload import Ask, random_texts

from mmengine.errors import ConfigError
from mmengine.gpu import sampling
from mmengine.gpu.text_ops import text_ops
from mmengine.models.plugin import ModelSpec
from mmengine.request import SamplingParams
from mmengine.runtime.attention import flashinfer_here
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.gpus import why_no_gpu
from mmengine.runtime.kv import KVPool
from mmengine.spec_decode.eagle3.config import MAX_DRAFTS
from mmengine.version import __version__
from mmengine_qwen3_vl.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
SIZES = Sizes(rows=(1, 16, 64, 256), context=1024, steps=48, budget=8192, prefill=8192, grid=(1, 64, 64))
DRY = Sizes(rows=(1, 8), context=24, steps=4, budget=32, prefill=64, grid=(1, 4, 4))
# Of the floor, or of the matmul rate; of transformers' rate; of the time that kernels run.
WANTED_DECODE = {1: 0.7, 64: 0.6, 256: 0.6}
WANTED_PREFILL = 0.55
WANTED_CONTINUOUS, WANTED_GENERATE = 5.0, 8.0
WANTED_BUSY = 0.97
TESTS = ("tests/gpu", "tests/runtime/test_runtime_masking.py", "tests/qwen3_vl/test_qwen3_vl_fused_text.py")
PACKAGES = ("transformers", "triton", "flashinfer-python", "numpy")


def device(tell: Teller) -> None:
    """What there is. Nothing is told of `device` where it cannot be used."""
    if not tell.dry:
        problem = why_no_gpu(torch.device("cuda"))
        if problem is not None:
            tell.skip("the device", problem)
            return
        free, total = torch.cuda.mem_get_info()
        tell.fact("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    for name in PACKAGES:
        try:
            tell.fact(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            tell.fact(name, "not installed")
    tell.fact("python", platform.python_version())
    tell.fact("torch", torch.__version__)
    tell.fact("cuda", torch.version.cuda)
    tell.fact("mmengine", __version__)
    tell.fact("device", "cpu (dry run)" if tell.dry else torch.cuda.get_device_name())


def compiling(dry: bool) -> dict[str, Work]:
    """What FlashInfer compiles, by name; nothing where it is not. All at once: the machine has many cores."""
    if dry or flashinfer_here.package_problem() is not None:
        return {}
    return {
        "norms and gate": _compile_text_ops,
        "decode": partial(_compile_attention, 16),
        "prefill": partial(_compile_attention, 32),
    }


def _compile_text_ops(tell: Teller) -> None:
    tell.fact("layer operations", text_ops(torch.device("cuda"), torch.bfloat16).by)


def _compile_attention(num_heads: int, tell: Teller) -> None:
    """As it compiles for the 2B (16 heads) and the 8B (32), over a small pool."""
    spec = ModelSpec(1, num_heads, 8, 128, 64, 64, 4096, 0, 1)
    make_backend("flashinfer", spec, KVPool(spec, 2, 16, torch.bfloat16, torch.device("cuda")))


def rates(tell: Teller) -> None:
    found = measure_rates(tell.device, tell.dry)
    tell.fact("copy_gb_per_s", found.copy / 1e9)
    tell.fact("matmul_tflops", found.matmul / 1e12)


def _rates(facts: dict[str, object]) -> Rates:
    if "matmul_tflops" not in facts:
        raise ConfigError("the rates of the device are not known, so there are no floors")
    return Rates(facts["copy_gb_per_s"] * 1e9, facts["matmul_tflops"] * 1e12)


def _dtype(tell: Teller) -> torch.dtype:
    return torch.float32 if tell.dry else torch.bfloat16


def tokens(tell: Teller) -> None:
    for verdict in compare_tokens(tell.device, 4 if tell.dry else 24):
        tell.check(verdict)


def tokens_beside_transformers(tell: Teller) -> None:
    tell.check(compare_transformers(tell.device, 4 if tell.dry else 24))


def backends(tell: Teller) -> None:
    verdicts, skipped = compare_backends(tell.device, _dtype(tell), 4 if tell.dry else 16)
    for verdict in verdicts:
        tell.check(verdict)
    for name, why in skipped.items():
        tell.skip(name, why)


def kernels(tell: Teller) -> None:
    tell.fact("sampling", sampling.describe(torch.device(tell.device)))
    tell.check(compare_layers(tell.device, _dtype(tell), tell.dry))
    tell.check(compare_sampling(tell.device, *((20, 300) if tell.dry else (500, 151_936))))


def bits(tell: Teller) -> None:
    try:
        tell.check(compare_bits(tell.device, _dtype(tell), tell.dry))
    except ConfigError as error:
        tell.skip("bits beside those alone", str(error))


def captured(tell: Teller) -> None:
    device, dtype = tell.device, _dtype(tell)
    for what, compare in (
        # Two heads of K and V: FlashInfer decodes eight by tensor cores.
        ("captured steps, 4 heads", partial(compare_graphs, device, dtype, 4)),
        ("captured steps, 8 heads", partial(compare_graphs, device, dtype, 8)),
        ("captured images", partial(compare_encoder_graphs, device, dtype, 96 if tell.dry else 512)),
        ("captured drafts", partial(compare_chains, device, dtype)),
    ):
        try:
            tell.check(compare())
        except ConfigError as error:
            tell.skip(what, str(error))


def wide(tell: Teller) -> None:
    for num_heads in (4, 8):
        verdict, how = compare_wide(tell.device, _dtype(tell), num_heads, 3 if tell.dry else 24)
        tell.check(verdict)
        tell.fact(f"answers of {num_heads} heads by", how)


def _shape(name: str, dry: bool) -> tuple[ModelConfig, Sizes]:
    return (reduced(SHAPES[name]), DRY) if dry else (SHAPES[name], SIZES)


def decode(name: str, facts: dict[str, object], tell: Teller) -> None:
    """Greedy by rows; then 64 rows by top-k with top-p, and by top-p alone, beside the same floor."""
    found, (shape, sizes) = _rates(facts), _shape(name, tell.dry)
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
    tell.fact(f"{name} steps replayed, and not, by why", bench.graph_steps)


def drafts(name: str, facts: dict[str, object], tell: Teller) -> None:
    """A chain of drafts of one row, by a head of random weights."""
    found, (shape, sizes) = _rates(facts), _shape(name, tell.dry)
    floor = MAX_DRAFTS * pass_bytes(shape) / found.copy
    try:
        for how, seconds in chain_seconds(shape, tell.device, torch.bfloat16, sizes.context).items():
            tell.goal(f"{name} {MAX_DRAFTS} drafts x1, {how}", Goal.of_time(seconds, floor, None))
    except ConfigError as error:
        tell.skip(f"{name} drafts", str(error))


def prompts(name: str, facts: dict[str, object], tell: Teller) -> None:
    found, (shape, sizes) = _rates(facts), _shape(name, tell.dry)
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


def invariant(name: str, facts: dict[str, object], tell: Teller) -> None:
    """A step of 64 rows and a long prompt with batch_invariant, beside the floors of those without."""
    found, (shape, sizes) = _rates(facts), _shape(name, tell.dry)
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


def beside_without(run: Run, name: str) -> None:
    """How many times as long it takes with batch_invariant, from what the parts told."""
    context = _shape(name, run.dry)[1].context
    for key, goal in run.goals.items():
        work, _, how = key.partition(", ")
        without = run.goals.get(f"{work}, context {context}") or run.goals.get(work)
        if key.startswith(name) and how == "batch_invariant" and without is not None:
            run.facts[f"{key}, times as long"] = round(goal.measured / without.measured, 2)


def idle(name: str, tell: Teller) -> None:
    if tell.dry:
        tell.skip(f"{name} GPU idle in decode", "a CPU has no timeline of kernels")
        return
    from gpu_idle import Idle

    network = random_model(SHAPES[name], tell.device, torch.bfloat16)
    bench, watch = Bench(network, tell.device, torch.bfloat16, 64, SIZES), Idle()
    bench.decode(64, SIZES.steps, watch)
    goal = Goal(watch.share, 1 - WANTED_BUSY, 1 - watch.share, WANTED_BUSY, "of the time")
    tell.goal(f"{name} GPU idle in decode x64", goal)


def _asks(name: str, dry: bool) -> tuple[ModelConfig, list[Ask], list[Ask]]:
    """Text requests and image requests, the same for every side. Equally long, so padding costs nothing."""
    shape, _ = _shape(name, dry)
    texts, images, words, num_new = (4, 2, 12, 4) if dry else (64, 32, 32, 128)
    prompt, grid = (16, (1, 4, 4)) if dry else (512, (1, 32, 32))
    random = random_texts(texts, prompt, num_new, shape.text.vocab_size)
    return shape, random, image_asks(shape, images, grid, words, num_new)


def ours(name: str, tell: Teller) -> None:
    shape, texts, images = _asks(name, tell.dry)
    longest = max(len(ask.prepared.prompt_token_ids) + ask.num_new for ask in (*texts, *images))
    sizes = replace(DRY if tell.dry else SIZES, context=longest)
    network = random_model(shape, tell.device, torch.bfloat16)
    bench = Bench(network, tell.device, torch.bfloat16, len(texts), sizes)
    tell.fact(f"{name} texts, tokens/s", round(bench.answer(texts), 1))
    tell.fact(f"{name} images, tokens/s", round(bench.answer(images), 1))
    tell.fact(f"{name} encodings replayed, and not, by why", bench.graph_encodings)


def by_generate(name: str, tell: Teller) -> None:
    """One image request after the other, of which an eighth is asked, and all in one batch."""
    shape, _, images = _asks(name, tell.dry)
    rival = rival_model(shape, tell.device, torch.bfloat16)
    few = images[: len(images) // 8 or 1]
    for how, asks, batch in (("all at once", images, len(images)), ("one by one", few, 1)):
        tell.fact(f"{name} images by generate, {how}, tokens/s", round(generate_rate(rival, asks, batch), 1))


def by_continuous_batching(name: str, tell: Teller) -> None:
    shape, texts, _ = _asks(name, tell.dry)
    rival = rival_model(shape, tell.device, torch.bfloat16)
    tell.fact("continuous batching by", attention_of(rival, texts))
    for how, rate in continuous_rates(rival, texts):
        if isinstance(rate, str):
            tell.skip(f"{name} texts by continuous batching, {how}", rate)
        else:
            tell.fact(f"{name} texts by continuous batching, {how}, tokens/s", round(rate, 1))


def beside(run: Run, name: str) -> None:
    """Goals from what each side told: ours beside the best of theirs."""
    for what, other, wanted in (
        ("texts", "continuous batching", WANTED_CONTINUOUS),
        ("images", "generate", WANTED_GENERATE),
    ):
        mine = run.facts.get(f"{name} {what}, tokens/s")
        theirs = [rate for key, rate in run.facts.items() if key.startswith(f"{name} {what} by {other}")]
        if mine is None or not theirs:
            run.skipped[f"{name} {what} beside {other}"] = "one of the two sides said nothing"
            continue
        run.goals[f"{name} {what} beside {other}"] = Goal.of_rival(mine, max(theirs), wanted)


def tests(tell: Teller) -> None:
    """pytest's tests of kernels, which take the GPU where there is one."""
    if tell.dry:
        tell.skip("tests of the kernels", "`make test` runs them without a GPU")
        return
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        tell.skip("tests of the kernels", f"{' and '.join(missing)} not installed")
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    tell.check(Verdict("tests of the kernels", lines[-1], done.returncode == 0, failed[:8]))

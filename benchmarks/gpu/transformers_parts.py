"""Answers the same requests with mmengine and with transformers on a GPU, and compares the speeds.

Not yet run on a GPU.
"""

from dataclasses import replace

import torch

from benchmarks.common.workload import Ask, random_texts
from benchmarks.gpu.roofline import Goal
from benchmarks.gpu.run import PartReporter, Run
from benchmarks.gpu.shapes import random_model
from benchmarks.gpu.speed import Bench
from benchmarks.gpu.speed_parts import shape_and_sizes
from benchmarks.gpu.transformers_rates import (
    attention_of,
    continuous_rates,
    generate_rate,
    image_asks,
    transformers_model,
)
from mmengine_qwen3_vl.config import ModelConfig

WANTED_CONTINUOUS, WANTED_GENERATE = 5.0, 8.0  # targets for mmengine's rate divided by transformers' rate


def _asks(name: str, dry: bool) -> tuple[ModelConfig, list[Ask], list[Ask]]:
    """Return the model's shape, its text requests and its image requests.

    All text requests have the same length, and all image requests too. Therefore, transformers needs no
    padding.
    """
    shape, _ = shape_and_sizes(name, dry)
    texts, images, words, num_new = (4, 2, 12, 4) if dry else (64, 32, 32, 128)
    prompt, grid = (16, (1, 4, 4)) if dry else (512, (1, 32, 32))
    random = random_texts(texts, prompt, num_new, shape.text.vocab_size)
    return shape, random, image_asks(shape, images, grid, words, num_new)


def ours(name: str, tell: PartReporter) -> None:
    shape, texts, images = _asks(name, tell.dry)
    _, sizes = shape_and_sizes(name, tell.dry)
    longest = max(len(ask.prepared.prompt_token_ids) + ask.num_new for ask in (*texts, *images))
    sizes = replace(sizes, context=longest)
    network = random_model(shape, tell.device, torch.bfloat16)
    bench = Bench(network, tell.device, torch.bfloat16, len(texts), sizes)
    tell.fact(f"{name} texts, tokens/s", round(bench.answer(texts), 1))
    tell.fact(f"{name} images, tokens/s", round(bench.answer(images), 1))
    tell.fact(f"{name} encodings replayed, and not, by why", bench.graph_counts.get("encodings", {}))


def by_generate(name: str, tell: PartReporter) -> None:
    """Measure transformers' `generate`: all image requests in a batch, and an eighth of them one by one."""
    shape, _, images = _asks(name, tell.dry)
    rival = transformers_model(shape, tell.device, torch.bfloat16)
    few = images[: len(images) // 8 or 1]
    for how, asks, batch in (("all at once", images, len(images)), ("one by one", few, 1)):
        tell.fact(f"{name} images by generate, {how}, tokens/s", round(generate_rate(rival, asks, batch), 1))


def by_continuous_batching(name: str, tell: PartReporter) -> None:
    shape, texts, _ = _asks(name, tell.dry)
    rival = transformers_model(shape, tell.device, torch.bfloat16)
    tell.fact("continuous batching by", attention_of(rival, texts))
    for how, rate in continuous_rates(rival, texts):
        if isinstance(rate, str):
            tell.skip(f"{name} texts by continuous batching, {how}", rate)
        else:
            tell.fact(f"{name} texts by continuous batching, {how}, tokens/s", round(rate, 1))


def beside(run: Run, name: str) -> None:
    """Record goals that compare mmengine's tokens per second with transformers' best figure."""
    for what, other, wanted in (
        ("texts", "continuous batching", WANTED_CONTINUOUS),
        ("images", "generate", WANTED_GENERATE),
    ):
        mine = run.facts.get(f"{name} {what}, tokens/s")
        theirs = [rate for key, rate in run.facts.items() if key.startswith(f"{name} {what} by {other}")]
        if mine is None or not theirs:
            run.skipped[f"{name} {what} beside {other}"] = "one side has no result"
            continue
        run.goals[f"{name} {what} beside {other}"] = Goal.of_rival(mine, max(theirs), wanted)

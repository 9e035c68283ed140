"""Compares mmengine on transformers' modules with mmengine's own modules and with transformers' batching.

All models have random weights and run in one process. In the tables, "described" means mmengine's own
modules.

    python -m benchmarks hosted --layers 8

Decoding: a Qwen3 with Qwen3-VL-2B's text shape, in bfloat16 and with int8 weights, 1 and 16 rows. An engine
on mmengine's modules and an engine on transformers' modules alternate every few steps. Batches
(hosted_batches.py): 16 text requests with 32 to 1,024 tokens run on half a billion weights, against
transformers' `generate_batch`. 8 requests with an image run against `generate`, which takes a single request
at a time. Ratios compare CPU times, because other load on the machine lengthens wall-clock times.
"""

import gc
import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.common.measure import Sample, use_threads
from benchmarks.common.report import Part, Table, Target, machine_lines, show

BURST = 5  # consecutive steps of an engine; the first is not timed
CONTEXT = 100
TOKENS = 1500  # token ids of prompts are below this number
WANTED_SHARE = 0.7
NAMES = {"native": "described", "transformers": "transformers' modules"}


def main(
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch, and CPUs.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the 2B shape, which has 28.")] = 28,
    steps: Annotated[int, typer.Option(min=2, help="Turns of each side.")] = 6,
    decoding: Annotated[bool, typer.Option(help="Also measure decode steps.")] = True,
    batches: Annotated[bool, typer.Option(help="Also run the batch of 16 requests.")] = True,
    images: Annotated[bool, typer.Option(help="Also run the requests with images.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as one JSON line.")] = False,
) -> None:
    """Measure decode steps on both kinds of modules, and a batch of requests."""
    use_threads(threads)
    import torch  # imported after the thread environment is set

    from benchmarks.any_model.hosted_batches import texts, with_images
    from benchmarks.common.half_billion_model import TEXT as HALF_BILLION

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        part = Part()
        if decoding:
            part.add(decode(Path(folder) / "two_billion", layers, steps))
        if batches:
            write_text_model(Path(folder) / "half_billion", HALF_BILLION)
            part.add(texts(Path(folder) / "half_billion", TOKENS))
        if images:
            part.add(with_images(Path(folder) / "images"))
    if json_output:
        print(part.dumps())
    else:
        show(part.tables, machine_lines(threads))


def write_text_model(folder: Path, sizes: dict[str, object]) -> None:
    """Write a Qwen3 text model with random bfloat16 weights and the included checkpoint's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # lazy: takes seconds

    from benchmarks.common.half_billion_model import write_random
    from mmengine.models.loader import resolve_folder

    shutil.copytree(
        resolve_folder(None), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    for extra in folder.glob("*preprocessor_config.json"):
        extra.unlink()
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(**{**sizes, "rope_parameters": rope}, tie_word_embeddings=True, dtype="bfloat16")
    write_random(folder, Qwen3ForCausalLM, config)
    ends = folder / "generation_config.json"
    ends.write_text(json.dumps({"eos_token_id": 2}))


def decode(folder: Path, layers: int, turns: int) -> Part:
    """Time decode steps on mmengine's modules and on transformers' modules."""
    from benchmarks.common.large_model import TEXT

    write_text_model(folder, TEXT | {"num_hidden_layers": layers, "vocab_size": 32_768})
    table = Table(
        f"Decode with the 2B shape in {layers} layers, context {CONTEXT}, {os.cpu_count()} CPUs",
        ("", "described", "transformers' modules", "share of the described speed", "equal answers"),
    )
    targets = []
    for quantize in ("none", "int8"):
        for rows in (1, 16):
            times, equal = _in_turns(folder, quantize, rows, turns)
            described, hosted = (median(each.cpu for each in times[impl]) for impl in NAMES)
            label = f"{'bfloat16' if quantize == 'none' else quantize}, {rows} row{'s' * (rows > 1)}"
            share = described / hosted
            figures = (f"{described * 1e3:.1f}", f"{hosted * 1e3:.1f}", f"{share:.2f}", f"{equal} of {rows}")
            table.rows.append((label, *figures))
            targets.append(Target(f"hosted_{quantize}_{rows}_rows", share, WANTED_SHARE))
    table.notes.append(
        f"Medians of steps. Both engines take turns of {BURST} steps. 32,768 tokens of vocabulary."
    )
    return Part([table], targets)


def _in_turns(folder: Path, quantize: str, rows: int, turns: int) -> tuple[dict[str, list[Sample]], int]:
    """Return each engine's step times, and the number of equal answers."""
    from benchmarks.common.engine_runner import EngineRunner
    from benchmarks.common.workload import random_texts
    from mmengine.config import EngineConfig

    asks = random_texts(rows, CONTEXT, turns * BURST + rows + 4, TOKENS)
    sizes = {
        "max_model_len": 512,
        "max_num_seqs": 16,
        "num_blocks": 513,
        "spec": "none",
        "quantize": quantize,
    }
    runners = {
        impl: EngineRunner(
            model=folder, dtype="bfloat16", config=EngineConfig.from_dict({**sizes, "model_impl": impl})
        )
        for impl in NAMES
    }
    running = {impl: runner.begin(asks, "decode") for impl, runner in runners.items()}
    times: dict[str, list[Sample]] = {impl: [] for impl in NAMES}
    for each in running.values():
        each.start()
    for turn in range(turns):
        for impl in list(NAMES)[:: -1 if turn % 2 else 1]:
            times[impl] += running[impl].steps(BURST)[1:]
    answers = [each.finish() for each in running.values()]
    for runner in runners.values():
        runner.close()
    gc.collect()
    return times, sum(mine == theirs for mine, theirs in zip(*answers, strict=True))


if __name__ == "__main__":
    typer.run(main)

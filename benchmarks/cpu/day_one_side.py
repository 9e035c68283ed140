"""Measure mmengine, transformers or a lower bound in a separate process, for the benchmark `day_one`.

    python -m benchmarks cpu.day_one_side mmengine FOLDER --photograph a.jpg --rows 1 --rows 4

The last output line is JSON with the fields of `Found`.
"""

import enum
import gc
import json
import os
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.common.measure import use_threads

NEW = 16  # tokens in an answer after the first token
PROMPT = 64  # tokens of a text prompt
QUESTION = "What is in the photograph?"


class Side(enum.StrEnum):
    MMENGINE = "mmengine"
    TRANSFORMERS = "transformers"
    COPY = "copy"  # torch reads and copies the weights
    TOUCH = "touch"  # writes new memory of the weights' size


@dataclass
class Found:
    """The measured seconds and bytes. `rates`: decoded tokens per second for each number of rows."""

    import_s: float = 0.0
    load_s: float = 0.0
    first_s: list[float] = field(default_factory=list)  # time to the first token for each photograph
    rates: dict[int, float] = field(default_factory=dict)
    peak_private: int = 0  # peak of private memory
    peak: int = 0  # private memory plus mapped file pages, at the peak
    kv_bytes: int = 0
    line: str = ""  # mmengine's line about the loaded model


class Peaks:
    """The peak of this process's private memory, sampled every 20 ms."""

    def __init__(self) -> None:
        self.private, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.private = max(self.private, status("RssAnon"))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.private = max(self.private, status("RssAnon"))


def status(name: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop(folder: Path) -> None:
    """Drop every page of the weights from the page cache."""
    for path in shards(folder):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd_s(folder: Path) -> float:
    """Return the seconds that dd takes to read the weights."""
    begun = time.perf_counter()
    for path in shards(folder):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M", "status=none"], check=True)
    return time.perf_counter() - begun


def main(
    side: Annotated[Side, typer.Argument(help="Side to measure.")],
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    photograph: Annotated[
        list[Path] | None, typer.Option(help="Photographs whose first token is timed.")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Numbers of rows that decode together.")] = None,
    threads: Annotated[int, typer.Option(help="Number of torch threads.")] = 1,
) -> None:
    """Load the model, answer, and print the figures."""
    use_threads(threads)
    peaks = Peaks()
    run = {Side.MMENGINE: mmengine, Side.TRANSFORMERS: transformers, Side.COPY: copy, Side.TOUCH: touch}[side]
    found = run(folder, photograph or [], rows or [])
    peaks.end()
    found.peak_private, found.peak = peaks.private, status("VmHWM")
    print(json.dumps(asdict(found)))


def mmengine(folder: Path, photographs: list[Path], rows: list[int]) -> Found:
    """Measure the engine with its default settings but without drafts. Random weights give repetitive
    answers, so drafts would be accepted unusually often.
    """
    found, begun = Found(), time.perf_counter()
    import llguidance  # noqa: F401 (all modules that loading would import)
    import tokenizers  # noqa: F401

    import mmengine_qwen3_vl.processing  # noqa: F401
    from mmengine import Engine
    from mmengine.build import build  # noqa: F401
    from mmengine.cli.loading import Loading
    from mmengine.config import EngineConfig
    from mmengine.models.network import Network  # noqa: F401
    from mmengine.models.progress import weights_reported_to

    found.import_s, begun = time.perf_counter() - begun, time.perf_counter()
    told = Loading()
    gc.disable()  # as mmengine's commands do while they load
    with weights_reported_to(told):
        engine = Engine(folder, dtype="bfloat16", config=EngineConfig(spec="none"))
    gc.enable()
    found.load_s = time.perf_counter() - begun
    told.loaded(engine.built)
    found.line, found.kv_bytes = told.sizes.removeprefix(": "), engine.built.kv_bytes
    with engine:
        for path in photographs:
            begun = time.perf_counter()
            engine.submit(question(path), max_tokens=1)
            while engine.has_work:
                engine.step()
            found.first_s.append(time.perf_counter() - begun)
        for count in rows:
            found.rates[count] = _rate(engine, count)
    return found


def _rate(engine, count: int) -> float:
    from mmengine.serve.prompt.prompt import Prompt

    for prompt in _prompts(engine, count):
        engine.submit(Prompt(token_ids=prompt), max_tokens=NEW + 1, ignore_eos=True)
    took = []
    while engine.has_work:
        begun = time.perf_counter()
        if sum(len(output.token_ids) for output in engine.step()) == count:
            took.append(time.perf_counter() - begun)
    return count / median(took[1:])


def _prompts(engine, count: int) -> list[list[int]]:
    import numpy as np

    chance = np.random.default_rng(count)
    return chance.integers(300, min(50_000, engine.built.spec.vocab_size // 2), (count, PROMPT)).tolist()


def question(path: Path) -> list[dict]:
    parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def transformers(folder: Path, photographs: list[Path], rows: list[int]) -> Found:
    """Measure transformers' model. mmengine's processor prepares the inputs before the time is taken."""
    found, begun = Found(), time.perf_counter()
    import torch
    from transformers import Qwen3VLForConditionalGeneration  # noqa: F401

    from benchmarks.common.reference import Reference, TokenClock, make_inputs
    from mmengine.models.plugin import Prepared  # noqa: F401
    from mmengine.models.registry import plugin_for
    from mmengine.serve.prompt.prompt import Prompt

    found.import_s, begun = time.perf_counter() - begun, time.perf_counter()
    reference = Reference(folder, torch.bfloat16)
    found.load_s = time.perf_counter() - begun
    processor = plugin_for(folder).load_processor(folder)
    for path in photographs:
        inputs = make_inputs([Prompt.of(question(path)).prepare(processor)], torch.bfloat16)
        begun = time.perf_counter()
        reference.generate(inputs, 1)
        found.first_s.append(time.perf_counter() - begun)
        # Shows progress in a run by hand; the benchmark reads only the last line.
        print(json.dumps(found.first_s), flush=True)
    for count in rows:
        ids = torch.randint(300, 1000, (count, PROMPT), generator=torch.Generator().manual_seed(count))
        types = torch.zeros_like(ids, dtype=torch.int32)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        clock = TokenClock()
        reference.generate(inputs, NEW + 1, clock)
        found.rates[count] = count / median(each.wall for each in clock.samples)
    return found


def copy(folder: Path, photographs: list[Path], rows: list[int]) -> Found:
    """Measure the time to copy all weights into this process's memory."""
    found, begun = Found(), time.perf_counter()
    from safetensors.torch import load_file

    found.import_s, begun = time.perf_counter() - begun, time.perf_counter()
    held = [tensor.clone() for path in shards(folder) for tensor in load_file(path).values()]
    found.load_s = time.perf_counter() - begun
    assert held
    return found


def touch(folder: Path, photographs: list[Path], rows: list[int]) -> Found:
    """Measure the time to write new memory of the weights' size, in huge pages if available."""
    found, begun = Found(), time.perf_counter()
    import torch

    from mmengine.native.linear import packed_buffer

    found.import_s, begun = time.perf_counter() - begun, time.perf_counter()
    torch.from_numpy(packed_buffer(sum(path.stat().st_size for path in shards(folder)))).fill_(1)
    found.load_s = time.perf_counter() - begun
    return found


if __name__ == "__main__":
    typer.run(main)

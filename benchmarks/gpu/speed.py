"""Measure the speed of one model in the engine: decode at several batch sizes, a long prompt, and images."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.common.workload import Ask
from benchmarks.gpu.roofline import timed
from mmengine.config import ENCODER_CACHE, EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.models.plugin import VisionLanguageModel
from mmengine.request import Request, SamplingParams
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.device.upload import upload_joined
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.startup.sizing import steps_in_flight
from mmengine_qwen3_vl import plugin

SETTLE = 4  # steps in which all rows decode, before the measured steps


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: tuple[int, ...]  # batch sizes of decode
    context: int  # tokens in each row when decode begins
    steps: int  # measured decode steps
    budget: int  # tokens per step
    prefill: int  # tokens in the long prompt
    grid: tuple[int, int, int]  # an image's grid (t, h, w) in patches
    small_grids: tuple[tuple[int, int, int], ...] = ((1, 16, 16), (1, 32, 32), (1, 44, 44))


@dataclass(frozen=True, slots=True)
class Decode:
    """Medians over the steps in which every row generated one token."""

    step_s: float
    cpu_s: float  # CPU time of this process, summed over its threads
    context: int  # tokens per row, on average over rows and steps


class Bench:
    """An engine core with a model, for up to `rows` decoding rows with `sizes.context` tokens each."""

    def __init__(
        self,
        network: VisionLanguageModel,
        device: str,
        dtype: torch.dtype,
        rows: int,
        sizes: Sizes,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._network, self._device, self._sizes = network, device, sizes
        longest = sizes.context + self._answer_length(rows, sizes.steps)
        config = EngineConfig(
            max_num_seqs=rows,
            token_budget=sizes.budget,
            max_model_len=longest,
            num_blocks=rows * -(-longest // 16) + 1,
            encoder_cache_size=ENCODER_CACHE,
            enable_prefix_caching=False,
            batch_invariant=batch_invariant,
        )
        opened = open_device(device)
        config = replace(config, max_in_flight=steps_in_flight(config, opened))
        self._executor = TorchExecutor(network, plugin.positions, config, Placement(opened, dtype))
        self.core = EngineCore(config, self._executor)
        self._count = 0

    def _prompt_steps(self, rows: int) -> int:
        """Return the number of steps that prefill `rows` prompts. Each step also reserves a token per row for
        decoding.
        """
        return -(-rows * self._sizes.context // (self._sizes.budget - rows))

    def _answer_length(self, rows: int, steps: int) -> int:
        return self._prompt_steps(rows) + SETTLE + steps + 16

    @property
    def attention(self) -> str:
        return type(self._executor._runner._attention).__name__

    @property
    def graph_counts(self) -> dict[str, dict[str, int]]:
        return self._executor.graph_counts

    def close(self) -> None:
        self.core.close()

    def prefill(self, tokens: int, repeats: int = 3) -> float:
        """Return the median time to the first token for a prompt with `tokens` tokens, in s, after a
        warm-up.
        """
        return median([self._until_first(tokens) for _ in range(repeats + 1)][1:])

    def _until_first(self, tokens: int) -> float:
        self._submit(self._prompts(1, tokens), 1)
        begin = time.perf_counter()
        self.drain()
        return time.perf_counter() - begin

    def decode(
        self,
        rows: int,
        steps: int,
        watch: AbstractContextManager | None = None,
        sampling: SamplingParams | None = None,
    ) -> Decode:
        """Decode `rows` rows for `steps` steps and return the medians. Without `sampling` decoding is greedy.
        `watch`: a context that covers only the measured steps.
        """
        prompts = self._prompts(rows, self._sizes.context)
        self._submit(prompts, self._answer_length(rows, steps), sampling)
        settled = 0  # steps in which all rows decoded; the first steps allocate memory for this batch size
        while settled < SETTLE:
            settled += self._whole_step(rows)
            if not self.core.has_work:
                raise RuntimeError(f"no step gave each of {rows} rows a token")
        walls, cpus = [], []
        with watch or nullcontext():
            while len(walls) < steps:
                cpu, begin = time.process_time(), time.perf_counter()
                if self._whole_step(rows):
                    walls.append(time.perf_counter() - begin)
                    cpus.append(time.process_time() - cpu)
                elif not self.core.has_work:
                    raise RuntimeError(f"{rows} rows ended before {steps} steps were measured")
        self.drain()
        context = self._sizes.context + SETTLE + (self._prompt_steps(rows) + steps) // 2
        return Decode(median(walls), median(cpus), context)

    def encode(self, grids: Sequence[tuple[int, int, int]]) -> float:
        """Return the vision tower's time in s for images with these grids (t, h, w in patches), in a single
        call.
        """
        patches = sum(t * h * w for t, h, w in grids)
        there = torch.zeros(patches, self._network.spec.patch_width, dtype=torch.uint8, device=self._device)
        with torch.inference_mode():
            return timed(lambda: self._network.encode(there, grids), self._device, 5)

    def encode_small(self, grid: tuple[int, int, int]) -> dict[str, float]:
        """Return the time from an image's pixels on the host to its features, in s. The key "launched" is the
        time without a CUDA graph. The key "replayed" is the time with a CUDA graph, and exists only if a
        captured graph fits the image's size.
        """
        t, h, w = grid
        pixels, device = (
            np.zeros((t * h * w, self._network.spec.patch_width), np.uint8),
            torch.device(self._device),
        )
        ways = {"launched": lambda: self._network.encode(upload_joined([pixels], device), [grid])}
        graphs = self._executor._runner._encoder_graphs
        with torch.inference_mode():
            if graphs is not None and graphs.encode([pixels], [grid]) is not None:
                ways["replayed"] = lambda: graphs.encode([pixels], [grid])
            return {how: timed(way, self._device, 9) for how, way in ways.items()}

    def answer(self, asks: Sequence[Ask]) -> float:
        """Return the generated tokens per second for complete answers, after a warm-up run. All requests are
        submitted before the first step.
        """
        return [self._answer_all(asks) for _ in range(2)][1]

    def _answer_all(self, asks: Sequence[Ask]) -> float:
        begin = time.perf_counter()
        for ask in asks:
            self._count += 1
            name, media = f"a{self._count}", ask.prepared.media
            sampling = SamplingParams(max_tokens=ask.num_new, ignore_eos=True, seed=0)
            items = tuple(one.item for one in media)
            request = Request(name, ask.prepared.prompt_token_ids, sampling, items, cache_salt=name)
            self._executor.attach(name, media)
            self.core.submit(request)
        self.drain()
        return sum(ask.num_new for ask in asks) / (time.perf_counter() - begin)

    def drain(self) -> None:
        while self.core.has_work:
            self.core.step()

    def _whole_step(self, rows: int) -> bool:
        outputs = list(self.core.step())
        return len(outputs) == rows and all(output.finish_reason is None for output in outputs)

    def _prompts(self, count: int, tokens: int) -> np.ndarray:
        vocab = self._network.spec.vocab_size
        return np.random.default_rng(0).integers(3, vocab, (count, tokens), dtype=np.int32)

    def _submit(self, prompts: np.ndarray, num_new: int, sampling: SamplingParams | None = None) -> None:
        sampling = replace(sampling or SamplingParams(), max_tokens=num_new, ignore_eos=True, seed=0)
        for prompt in prompts:
            self._count += 1
            self.core.submit(Request(f"r{self._count}", prompt, sampling))

"""Speeds of one model on one device: prefill, decode by batch size, one image through the vision tower."""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.models.plugin import VisionLanguageModel
from mmengine.request import Request, SamplingParams
from mmengine.runtime.executor import TorchExecutor
from mmengine_qwen3_vl import plugin


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: tuple[int, ...]  # batch sizes of decode
    prompt: int  # tokens of a prompt
    prefills: int  # prompts of the prefill run
    steps: int  # decode steps that count
    grid: tuple[int, int, int]  # patches of the image


def speeds(network: VisionLanguageModel, device: str, dtype: torch.dtype, sizes: Sizes) -> dict[str, object]:
    """Times in milliseconds, rates in tokens a second; each run is done twice and the second counts."""
    most = max(*sizes.rows, sizes.prefills)
    longest = sizes.prompt + sizes.steps + 4
    config = EngineConfig(
        max_num_seqs=most,
        token_budget=max(8192, most),
        max_model_len=longest,
        num_blocks=most * -(-longest // 16) + 1,
        enable_prefix_caching=False,
    )
    core = EngineCore(config, TorchExecutor(network, plugin.positions, config, device, dtype))
    prompts = np.random.default_rng(0).integers(
        3, network.spec.vocab_size, (most, sizes.prompt), dtype=np.int32
    )
    prefill = [_prefill(core, prompts[: sizes.prefills], f"p{again}") for again in range(2)][1]
    decode = {}
    for rows in sizes.rows:
        runs = [_decode(core, prompts[:rows], sizes.steps, f"d{rows}.{again}") for again in range(2)]
        decode[str(rows)] = runs[1]
    core.close()
    return {
        "prompt_tokens": sizes.prompt,
        "prefill_tokens_per_s": round(sizes.prefills * sizes.prompt / prefill),
        "decode": decode,
        "image_tokens": sizes.grid[0] * sizes.grid[1] * sizes.grid[2] // 4,
        "image_ms": round(_encode(network, device, sizes.grid) * 1e3, 3),
    }


def _submit(core: EngineCore, prompts: np.ndarray, num_new: int, name: str) -> None:
    sampling = SamplingParams(max_tokens=num_new, ignore_eos=True, seed=0)
    for number, prompt in enumerate(prompts):
        core.submit(Request(f"{name}.{number}", prompt, sampling))


def _prefill(core: EngineCore, prompts: np.ndarray, name: str) -> float:
    """Seconds until every prompt has its first token."""
    begin = time.perf_counter()
    _submit(core, prompts, 1, name)
    while core.has_work:
        core.step()
    return time.perf_counter() - begin


def _decode(core: EngineCore, prompts: np.ndarray, steps: int, name: str) -> dict[str, float]:
    """Medians over the steps in which every row made one token."""
    _submit(core, prompts, steps + 2, name)
    walls, devices, decoding = [], [], False
    while core.has_work:
        device_ns, begin = core.stats().device_ns, time.perf_counter()
        outputs = list(core.step())
        wall = time.perf_counter() - begin
        whole = len(outputs) == len(prompts) and all(output.finish_reason is None for output in outputs)
        if decoding and whole:
            walls.append(wall)
            devices.append((core.stats().device_ns - device_ns) / 1e6)
        decoding = whole
    step = median(walls)
    return {
        "step_ms": round(step * 1e3, 3),
        "device_ms": round(median(devices), 3),
        "tokens_per_s": round(len(prompts) / step, 1),
    }


def _encode(network: VisionLanguageModel, device: str, grid: tuple[int, int, int]) -> float:
    """Seconds of one image, the median of five after one that warms up."""
    count = grid[0] * grid[1] * grid[2]
    patches = np.random.default_rng(0).integers(0, 256, (count, network.spec.patch_width), dtype=np.uint8)
    there = torch.from_numpy(patches).to(device)
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        with torch.inference_mode():
            network.encode(there, [grid])
        if there.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])

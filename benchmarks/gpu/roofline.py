"""Computes lower bounds for a step's time. A bound is the step's bytes divided by the measured copy rate, or
the step's FLOPs divided by the measured matmul rate.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.vision.config import VisionConfig
from mmengine_qwen3_vl.config import ModelConfig

BYTES = 2  # per value in bfloat16
WARM_S = 0.3  # an idle GPU's clocks need some time to rise


@dataclass(frozen=True, slots=True)
class Rates:
    copy: float  # bytes per second, reads plus writes
    matmul: float  # bfloat16 FLOPs per second


@dataclass(frozen=True, slots=True)
class Goal:
    """Compares a measured time with its lower bound, or a measured throughput with a rival's throughput.
    `floor`: the bound, or the rival's throughput. `measured` and `floor` have the unit `unit`. `fraction`:
    `floor / measured` for a time, `measured / floor` for a throughput. `wanted`: the lowest fraction that
    meets the goal, or None.
    """

    measured: float
    floor: float
    fraction: float
    wanted: float | None
    unit: str

    @property
    def met(self) -> bool | None:
        return None if self.wanted is None else self.fraction >= self.wanted

    @classmethod
    def of_time(cls, seconds: float, floor_s: float, wanted: float | None) -> "Goal":
        return cls(seconds * 1e3, floor_s * 1e3, floor_s / seconds, wanted, "ms")

    @classmethod
    def of_rival(cls, ours: float, theirs: float, wanted: float) -> "Goal":
        """Compare tokens per second."""
        return cls(ours, theirs, ours / theirs, wanted, "tokens/s")

    def as_dict(self) -> dict[str, float | bool | str | None]:
        figures = {name: round(getattr(self, name), 4) for name in ("measured", "floor", "fraction")}
        return figures | {"met": self.met, "wanted": self.wanted, "unit": self.unit}


def measure_rates(device: str, dry: bool) -> Rates:
    """Measure a copy of 1 GiB and a product of two 8,192 x 8,192 matrices, and return the rates.

    Each rate comes from the median time of ten runs. The matrices are random: zeros or ones need less power,
    so a GPU multiplies them faster.
    """
    size, side = (2**20, 128) if dry else (2**30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return Rates(
        2 * size / timed(lambda: target.copy_(source), device),
        2 * side**3 / timed(lambda: torch.mm(left, right, out=out), device),
    )


def timed(run: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Return the median seconds of `run` after a warm-up. CUDA events measure the time on a GPU."""
    run()
    if device == "cuda":
        warm = time.perf_counter()
        while time.perf_counter() - warm < WARM_S:
            run()
            torch.cuda.synchronize()
    seconds = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def layer_weights(c: DecoderConfig) -> int:
    """Return the number of weights in one decoder layer's matrices."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return attention + 3 * c.hidden_size * c.intermediate_size


def decode_bytes(shape: ModelConfig, rows: int, context: int) -> int:
    """Return the bytes that a decode step must read: the matrices in the layers and the head once, and the KV
    of `context` tokens for each row.
    """
    c = shape.text
    weights = c.num_layers * layer_weights(c) + c.vocab_size * c.hidden_size
    kv = 2 * c.num_layers * c.num_kv_heads * c.head_dim
    return BYTES * (weights + rows * context * kv)


def prefill_flops(shape: ModelConfig, tokens: int) -> int:
    """Return the FLOPs of one prompt: all matrices and causal attention.

    The output head is left out: prefill computes the logits of only the last token.
    """
    c = shape.text
    linear = 2 * tokens * c.num_layers * layer_weights(c)
    return linear + 2 * c.num_layers * c.num_heads * c.head_dim * tokens * tokens


def vision_flops(shape: ModelConfig, grid: tuple[int, int, int]) -> int:
    """Return the FLOPs of one image or video with `grid` (frames, height, width in patches).

    The sum covers the patch embedding, all layers and all mergers. Each frame attends only to itself.
    """
    c: VisionConfig = shape.vision
    frames, patches = grid[0], grid[1] * grid[2]
    layer = 4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size
    attention = 4 * patches * patches * c.hidden_size
    joined = c.merge_size**2 * c.hidden_size
    merger = joined * joined + joined * c.out_hidden_size
    per_frame = 2 * patches * (c.depth * layer + c.patch_width * c.hidden_size) + c.depth * attention
    mergers = (1 + len(c.deepstack_layers)) * 2 * (patches // c.merge_size**2) * merger
    return frames * (per_frame + mergers)

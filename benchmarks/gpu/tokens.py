"""Compare attention backends with torch's attention. Also check, with the package's small checkpoint, that a
device gives the same tokens as the CPU and transformers.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.common.reference import Reference, describe_mismatches, make_inputs
from benchmarks.common.workload import Ask, mixed
from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.loader import resolve_folder
from mmengine.models.plugin import ModelSpec
from mmengine.request import SamplingParams
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.registry import ATTENTION_BACKENDS, make_backend
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.kv.pool import KVPool
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.text.request_output import Choice

# A device may choose another token if the CPU's two best logprobs differ by at most this value.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.5}
POOL = EngineConfig(num_blocks=4096)  # fixed, because this process creates several engines
Answer = tuple[list[int], list[float]]  # tokens, and each token's gap between the two best logprobs


@dataclass(slots=True)
class Verdict:
    """The result of one comparison. `said` summarizes it, `notes` list the differences."""

    name: str
    said: str
    right: bool
    notes: list[str] = field(default_factory=list)


def compare_tokens(device: str, count: int) -> list[Verdict]:
    """Compare tokens from the package's checkpoint on `device` (in float32 and bfloat16) with the CPU's."""
    with Engine(device="cpu", dtype="float32", config=POOL) as engine:
        asks = mixed(engine.processor, count, 48)
        wanted = answers(engine, asks)
    verdicts = []
    for dtype in ("float32", "bfloat16"):
        with Engine(device=device, dtype=dtype, config=POOL) as engine:
            parted = compare_answers(wanted, answers(engine, asks))
        largest = max((one["gap"] for one in parted), default=0.0)
        said = f"{count - len(parted)} of {count} equal, largest gap {largest:.1e}"
        notes = [
            f"request {one['request']} diverges at token {one['token']}, gap {one['gap']}" for one in parted
        ]
        right = largest <= ROUNDING[dtype]
        verdicts.append(Verdict(f"tokens on {device} in {dtype} beside the CPU's", said, right, notes[:4]))
    return verdicts


def answers(engine: Engine, asks: list[Ask]) -> list[Answer]:
    """Return each request's greedy answer."""
    samplings = [SamplingParams(max_tokens=ask.num_new, logprobs=2, seed=0) for ask in asks]
    return [
        (choice.token_ids, [best[1] - second[1] for _, best, second in choice.logprobs])
        for choice in _choices(engine, asks, samplings)
    ]


def _choices(engine: Engine, asks: list[Ask], samplings: list[SamplingParams]) -> list[Choice]:
    """Run all requests, and return the answers in the order of `asks`."""
    names = [
        engine.submit_prepared(ask.prepared, Options(sampling), stream=False)
        for ask, sampling in zip(asks, samplings, strict=True)
    ]
    done: dict[str, Choice] = {}
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id] = output.completion.choices[0]
    return [done[name] for name in names]


def compare_answers(wanted: list[Answer], got: list[Answer]) -> list[dict[str, float | int]]:
    """Return the first difference in each answer that differs: the request's index, the token's index, and
    the gap in `wanted` at this token.
    """
    parted = []
    for request, ((want, gaps), (mine, _)) in enumerate(zip(wanted, got, strict=True)):
        if want != mine:
            shorter = min(len(want), len(mine))
            place = next((i for i in range(shorter) if want[i] != mine[i]), shorter - 1)
            parted.append({"request": request, "token": place, "gap": round(gaps[place], 6)})
    return parted


def compare_transformers(device: str, count: int) -> Verdict:
    """Compare the engine's tokens with tokens from transformers' `generate`, in float32 on the same device.

    The engine batches the prompts; `generate` gets one at a time.
    """
    reference = Reference(resolve_folder(None), torch.float32, device)
    with Engine(device=device, dtype="float32", config=POOL) as engine:
        asks = mixed(engine.processor, count, 24, seed=6)
        lengths = [ask.num_new for ask in asks]
        samplings = [SamplingParams(max_tokens=n, min_tokens=n, seed=0) for n in lengths]
        got = [choice.token_ids for choice in _choices(engine, asks, samplings)]
    inputs = [make_inputs([ask.prepared]) for ask in asks]
    wanted = [reference.generate(each, ask.num_new)[0] for each, ask in zip(inputs, asks, strict=True)]
    notes = describe_mismatches(reference, [ask.kind for ask in asks], inputs, got, wanted)
    equal = sum(mine == theirs for mine, theirs in zip(got, wanted, strict=True))
    name = f"tokens on {device} in float32 beside transformers' generate"
    return Verdict(name, f"{equal} of {count} equal", equal == count, notes)


def compare_backends(device: str, dtype: torch.dtype, rounds: int) -> tuple[list[Verdict], dict[str, str]]:
    """Compare every available attention backend with torch's, on `rounds` random ragged batches.

    Heads are as in Qwen3-VL 2B, Qwen3-VL 8B and the package's checkpoint. Returns the verdicts, and a dict
    from an unavailable backend's name to the reason.
    """
    bound = max(8 * torch.finfo(dtype).eps, 1e-5)
    verdicts, skipped = [], {}
    for name in (name for name in ATTENTION_BACKENDS.names() if name != "torch"):
        found: dict[str, float] = {}
        for num_heads, head_dim in ((16, 128), (32, 128), (16, 32)):
            spec = ModelSpec(2, num_heads, 8, head_dim, 64, 64, 4096, 0, 1)
            try:
                gap = _largest_gap(name, spec, torch.device(device), dtype, rounds)
            except ConfigError as error:
                why = str(error)
            else:
                found[f"{num_heads} heads of {head_dim}"] = gap
        if not found:
            skipped[f"attention {name}"] = why
        else:
            gaps = ", ".join(f"{gap:.1e} with {heads}" for heads, gap in found.items())
            said = f"largest gap {gaps} in {rounds} ragged batches (tolerance {bound:.1e})"
            verdicts.append(Verdict(f"attention {name} beside torch", said, max(found.values()) <= bound))
    return verdicts, skipped


def _largest_gap(name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    rng, largest = np.random.default_rng(1), 0.0
    generator = torch.Generator(device).manual_seed(1)
    for turn in range(rounds):
        meta, num_blocks = _ragged(rng, 1 if turn % 2 else 40, 300 if turn < rounds - 2 else 3000)
        pools = [KVPool(spec, num_blocks, 16, dtype, open_device(str(device))) for _ in range(2)]
        before = torch.randn(pools[0].blocks.shape, device=device, generator=generator).to(dtype)
        found = []
        shape = (int(meta.query_lens.sum()), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        qkv = torch.randn(shape, device=device, generator=generator).to(dtype)
        q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
        for each, pool in zip((name, "torch"), pools, strict=True):
            pool.blocks.copy_(before)
            backend = make_backend(each, spec, pool)
            backend.begin(meta)
            backend.append(1, k, v)
            found.append(backend.run(1, q).float())
        gap = float(((found[0] - found[1]).abs() / found[1].abs().clamp(min=1)).max())
        largest = max(largest, gap if gap == gap else float("inf"))
    return largest


def _ragged(rng: np.random.Generator, longest_query: int, longest: int) -> tuple[AttentionMeta, int]:
    """Return a random step's metadata, and the number of blocks in the KV pool. The step has up to nine rows
    with scattered blocks.
    """
    rows = int(rng.integers(1, 10))
    queries = rng.integers(1, longest_query + 1, rows).astype(np.int32)
    kv_lens = (queries + rng.integers(0, longest, rows)).astype(np.int32)
    width = -(-int(kv_lens.max()) // 16)
    blocks = 1 + rng.permutation(rows * width).astype(np.int32).reshape(rows, width)
    slots = [
        blocks[row][places // 16].astype(np.int64) * 16 + places % 16
        for row in range(rows)
        for places in [np.arange(kv_lens[row] - queries[row], kv_lens[row])]
    ]
    return AttentionMeta(queries, kv_lens, np.concatenate(slots), blocks), rows * width + 1

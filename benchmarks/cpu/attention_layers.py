"""Measures the CPU kernels and torch on attention with windows, soft caps, sinks or small value dimensions.

    python -m benchmarks attention_layers

Rows have 8,192 keys in blocks of 16 tokens, with 16 heads over 8 KV heads of dimension 128. Each figure is
the minimum CPU time of one layer over several runs.
"""

import time
from collections.abc import Callable
from typing import Annotated

import typer

from benchmarks.common.measure import use_threads
from benchmarks.common.report import Part, Table, machine_lines, show

KEYS, BLOCK = 8192, 16
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
STEPS = {"decode, 4 rows": (1, 1, 1, 1), "prompt, 64 tokens": (64,)}


def main(
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch, and CPUs.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Runs of each backend.")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as one JSON line.")] = False,
) -> None:
    """Measure one layer of each kind."""
    use_threads(threads)
    import torch  # imported after the thread environment is set

    torch.set_num_threads(threads)
    table = Table(
        f"One layer over {KEYS:,} keys, CPU ms",
        ("", "float32: torch", "kernels", "bfloat16: torch", "kernels"),
    )
    found = [_measure(dtype, turns) for dtype in (torch.float32, torch.bfloat16)]
    for label in found[0]:
        table.rows.append((label, *(f"{seconds * 1e3:.2f}" for each in found for seconds in each[label])))
    part = Part([table], [])
    if json_output:
        print(part.dumps())
    else:
        show(part.tables, machine_lines(threads))


def _measure(dtype: object, turns: int) -> dict[str, tuple[float, ...]]:
    """Return the times (torch, kernels) in seconds by label."""
    import numpy as np
    import torch

    from mmengine.models.spec import LayerAttention, ModelSpec
    from mmengine.runtime.attention.base import AttentionMeta
    from mmengine.runtime.attention.registry import make_backend
    from mmengine.runtime.device.registry import open_device
    from mmengine.runtime.kv.pool import KVPool

    assert isinstance(dtype, torch.dtype)
    layers = {
        "plain": LayerAttention(0),
        "window of 512": LayerAttention(0, window=512),
        "soft cap": LayerAttention(0, softcap=50.0),
        "sinks": LayerAttention(0, has_sinks=True),
        "values of 64": LayerAttention(4, value_dim=64),
    }
    sizes = (len(layers), HEADS, KV_HEADS, HEAD_DIM, HEADS * HEAD_DIM, 64, KEYS + 1, 0, 8)
    spec = ModelSpec(*sizes, attention=tuple(layers.values()))
    blocks = KEYS // BLOCK
    pool = KVPool(spec, 1 + 4 * blocks, BLOCK, dtype, open_device("cpu"))
    pool.blocks.normal_(generator=torch.Generator().manual_seed(1))
    pool.blocks[1, :, 1, ..., 64:] = 0
    table = np.random.default_rng(1).permutation(1 + np.arange(4 * blocks)).astype(np.int32).reshape(4, -1)
    backends = [make_backend(name, spec, pool) for name in ("torch", "native")]
    sinks = torch.linspace(-1, 1, HEADS)
    found = {}
    for step, counts in STEPS.items():
        lens, places = np.full(len(counts), KEYS, np.int32), np.zeros(sum(counts), np.int64)
        meta = AttentionMeta(np.array(counts, np.int32), lens, places, table[: len(counts)])
        q = torch.randn(sum(counts), HEADS, HEAD_DIM).to(dtype)
        for number, (name, layer) in enumerate(layers.items()):
            given = (number, q, sinks) if layer.has_sinks else (number, q)
            times: list[list[float]] = [[], []]
            for _ in range(turns):
                for side, backend in zip(times, backends, strict=True):
                    backend.begin(meta)
                    side.append(_seconds(lambda run=backend.run, args=given: run(*args)))
            found[f"{step}: {name}"] = tuple(map(min, times))
    return found


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    typer.run(main)

"""Are captured decode steps those that are launched kernel by kernel, over the same KV blocks?"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from gpu_shapes import SHAPES, random_model, reduced
from gpu_tokens import Verdict

from mmengine.errors import ConfigError
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.graphs.buckets import Frame, row_sizes
from mmengine.runtime.graphs.decode import DecodeGraphs
from mmengine.runtime.graphs.recorder import CudaRecorder
from mmengine.runtime.kv import KVPool

MAX_ROWS, BLOCK_SIZE, LONGEST = 9, 16, 20  # blocks a row at most


class Again:
    """Stands in for CUDA graphs on a CPU: what is captured is called again."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return compute


def compare_graphs(device: str, dtype: torch.dtype) -> Verdict:
    """Hidden states of random decode steps of every number of rows, captured beside launched. Raises
    ConfigError where attention cannot be captured, or no step could be."""
    shape = reduced(SHAPES["2B"])
    shape = replace(shape, text=replace(shape.text, head_dim=128, mrope_section=(24, 20, 20)))
    model, where = random_model(shape, device, dtype), torch.device(device)
    pool = KVPool(model.spec, 1 + MAX_ROWS * LONGEST, BLOCK_SIZE, dtype, where)
    attention = make_backend("auto", model.spec, pool)
    if device == "cuda" and not attention.captures:
        raise ConfigError(f"{type(attention).__name__} cannot be captured")
    with torch.inference_mode():
        recorder = CudaRecorder(where) if device == "cuda" else Again()
        graphs = DecodeGraphs(model, attention, recorder, where, block_size=BLOCK_SIZE, max_rows=MAX_ROWS)
        pool.blocks.normal_(generator=torch.Generator(where).manual_seed(2))
        gaps = [_gap(model, attention, graphs, rows) for rows in range(1, MAX_ROWS + 1)]
    bound = max(8 * torch.finfo(dtype).eps, 1e-5)
    said = f"largest gap {max(gaps):.1e} in {MAX_ROWS} steps, at most {bound:.1e}"
    return Verdict("decode captured beside launched", said, max(gaps) <= bound)


def _gap(model, attention, graphs: DecodeGraphs, rows: int) -> float:
    """How far the captured step is from the launched one, beside the largest value."""
    rng = np.random.default_rng(rows)
    size = next(size for size in row_sizes(MAX_ROWS) if size >= rows)
    ids = np.zeros((4, size), np.int64)  # token ids and three rows of positions
    ids[0, :rows] = rng.integers(3, model.spec.vocab_size, rows)
    kv_lens = rng.integers(1, LONGEST * BLOCK_SIZE, rows).astype(np.int32)
    ids[1:, :rows] = kv_lens - 1
    table = 1 + rng.permutation(MAX_ROWS * LONGEST)[: rows * LONGEST].astype(np.int32).reshape(rows, LONGEST)
    last = kv_lens - 1
    slots = table[np.arange(rows), last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE
    meta = AttentionMeta(np.ones(rows, np.int32), kv_lens, slots, table)
    there = torch.from_numpy(ids).to(graphs.inputs.device)
    graphs.inputs[: 4 * size] = there.view(-1)
    frame = Frame(Bucket(size, 1), slice(0, rows))
    try:
        captured = graphs.run(frame, meta)[:rows].float().clone()
    except KeyError:  # what was captured is by bucket
        raise ConfigError("no step could be captured; a warning above says why") from None
    attention.begin(meta)
    launched = model.forward(model.embed(there[0, :rows]), None, there[1:, :rows].contiguous(), attention)
    gap = float((captured - launched.float()).abs().max() / launched.abs().max())
    return gap if gap == gap else float("inf")

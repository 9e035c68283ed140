"""Compare CUDA graphs with ordinary kernel launches, for decode steps and for encoder calls with images and
videos.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.shapes import SHAPES, random_model, reduced, wide_shape
from benchmarks.gpu.tokens import Verdict
from mmengine.errors import ConfigError
from mmengine.gpu.vision_ops import VisionOps, attend_by_frames, rotate
from mmengine.models.network import Network
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.device.upload import upload_joined
from mmengine.runtime.graphs.buckets import Frame, row_sizes
from mmengine.runtime.graphs.decode import DecodeGraphs
from mmengine.runtime.graphs.encoder import EncoderGraphs
from mmengine.runtime.graphs.encoder_sizes import encoder_sizes
from mmengine.runtime.kv.pool import KVPool

MAX_ROWS, BLOCK_SIZE, LONGEST = 9, 16, 20  # LONGEST: maximum blocks per row


class EagerRecorder:
    """Replaces CUDA graphs on a CPU: a replay calls the recorded function again."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return compute


def make_recorder(device: str) -> Recorder:
    return open_device(device).recorder() or EagerRecorder()


def compare_graphs(device: str, dtype: torch.dtype, num_heads: int) -> Verdict:
    """Compare the hidden states of decode steps with and without CUDA graphs, for 1 to MAX_ROWS rows.

    The model has two KV heads. Raises ConfigError if attention cannot be captured or no step was captured.
    """
    model, where = random_model(wide_shape(num_heads), device, dtype), torch.device(device)
    pool = KVPool(model.spec, 1 + MAX_ROWS * LONGEST, BLOCK_SIZE, dtype, open_device(device))
    attention = make_backend("auto", model.spec, pool)
    if device == "cuda" and not attention.captures:
        raise ConfigError(f"{type(attention).__name__} cannot be captured")
    with torch.inference_mode():
        recorder = make_recorder(device)
        graphs = DecodeGraphs(
            model, attention, recorder, where, dtype, block_size=BLOCK_SIZE, max_rows=MAX_ROWS
        )
        pool.blocks.normal_(generator=torch.Generator(where).manual_seed(2))
        gaps = [_gap(model, attention, graphs, rows) for rows in range(1, MAX_ROWS + 1)]
    return _verdict(f"decode of {num_heads} heads captured beside launched", gaps, dtype)


def compare_encoder_graphs(device: str, dtype: torch.dtype, most_embeds: int) -> Verdict:
    """Compare encoder calls with and without CUDA graphs, for random images and videos with up to
    `most_embeds` embeddings.

    The towers are narrow. Their head dimension is 64 or 72, as in the 2B model and in the 8B model. Raises
    ConfigError if a tower or a call cannot be captured.
    """
    gaps = []
    for num_heads, width in ((1, 64), (2, 144)):
        shape = reduced(SHAPES["2B"])
        tower = replace(shape.vision, num_heads=num_heads, hidden_size=width)
        model = random_model(replace(shape, vision=tower), device, dtype)
        if device == "cpu":
            model._vision.ops = VisionOps(rotate, attend_by_frames)
        with torch.inference_mode():
            gaps += _encoder_gaps(model, make_recorder(device), most_embeds)
    return _verdict("images captured beside launched", gaps, dtype)


def _encoder_gaps(model: Network, recorder: Recorder, most_embeds: int) -> list[float]:
    sizes = encoder_sizes(most_embeds, model.spec.merge_size)
    encoder = model.capturable_encoder(sizes[-1])
    if encoder is None:
        raise ConfigError("the device has no attention kernel for images of different sizes")
    graphs, rng, gaps = EncoderGraphs(encoder, sizes, recorder), np.random.default_rng(5), []
    # Smaller calls follow larger calls, so that the buffers contain stale data.
    for share in (1.0, 0.5, 0.8, 0.2, 0.3, 0.1):
        grids = _grids(rng, int(share * sizes[-1].num_patches), sizes[-1].num_segments)
        patches = [rng.integers(0, 256, (t * h * w, model.spec.patch_width), np.uint8) for t, h, w in grids]
        found = graphs.encode(patches, grids)
        if found is None:
            raise ConfigError(f"images are launched instead of replayed: {graphs.num_calls}")
        captured = found.float().clone()
        gaps.append(_apart(captured, model.encode(upload_joined(patches, model.device), grids)))
    return gaps


def _grids(rng: np.random.Generator, num_patches: int, num_frames: int) -> list[tuple[int, int, int]]:
    """Return random grids (t, h, w) for images and two-frame videos: as many as fit in `num_patches` and
    `num_frames`, but at least one.
    """
    grids: list[tuple[int, int, int]] = []
    side = int((num_patches / 2) ** 0.5) // 2
    while True:
        t, h, w = int(rng.integers(1, 3)), *(2 * rng.integers(1, side + 1, 2)).tolist()
        num_patches, num_frames = num_patches - t * h * w, num_frames - t
        if grids and min(num_patches, num_frames) < 0:
            return grids
        grids.append((t, h, w))


def _verdict(name: str, gaps: list[float], dtype: torch.dtype) -> Verdict:
    bound = max(8 * torch.finfo(dtype).eps, 1e-5)
    said = f"largest gap {max(gaps):.1e} in {len(gaps)} calls (tolerance {bound:.1e})"
    return Verdict(name, said, max(gaps) <= bound)


def _gap(model, attention, graphs: DecodeGraphs, rows: int) -> float:
    """Return the relative difference between a step with and without a CUDA graph (see `_apart`)."""
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
    except KeyError:  # the bucket has no graph
        raise ConfigError("no step could be captured; a warning above says why") from None
    attention.begin(meta)
    launched = model.forward(model.embed(there[0, :rows]), None, there[1:, :rows].contiguous(), attention)
    return _apart(captured, launched)


def _apart(captured: torch.Tensor, launched: torch.Tensor) -> float:
    """Return the largest difference, divided by the largest value without a CUDA graph."""
    gap = float((captured - launched.float()).abs().max() / launched.float().abs().max())
    return gap if gap == gap else float("inf")

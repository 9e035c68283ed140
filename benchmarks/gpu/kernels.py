"""Check GPU kernels at real sizes. The references are TextDecoder (the decoder without fused kernels) and the
CPU's sampler.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.shapes import SHAPES, RandomWeights, reduced
from benchmarks.gpu.tokens import Verdict
from mmengine.core.executor import Admission
from mmengine.gpu.text_ops import text_ops
from mmengine.models.config import make_spec
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.models.decoder.text import TextDecoder
from mmengine.models.network import AnyTextDecoder
from mmengine.request import Request, SamplingParams
from mmengine.runtime.attention.base import AttentionBackend, AttentionMeta
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.kv.pool import KVPool
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler

SAMPLINGS = (
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.3, "min_p": 0.05},
    {"temperature": 1.5},
    {},
)


def compare_layers(device: str, dtype: torch.dtype, dry: bool) -> Verdict:
    """Compare the fused decoder with the plain decoder on two layers with the 8B model's width.

    Both decoders run three prompts and a decode step with torch's attention. The tolerances are absolute,
    because normed hidden states have a magnitude near 1.
    """
    shape = reduced(SHAPES["8B"]) if dry else SHAPES["8B"]
    shape, where = replace(shape, text=replace(shape.text, num_layers=2)), torch.device(device)
    spec = make_spec(shape)
    lengths, found = (5, 37, 300), []
    with torch.inference_mode():
        decoders = (
            TextDecoder(shape.text, RandomWeights(shape, where, dtype), where),
            FusedTextDecoder(shape.text, RandomWeights(shape, where, dtype), where, text_ops(where, dtype)),
        )
        for decoder in decoders:
            attention = TorchPagedAttention(spec, KVPool(spec, 100, 16, dtype, open_device(str(where))))
            steps = (zip(range(3), lengths, strict=True), [(row, 1) for row in range(3)])
            computed = np.zeros(3, np.int32)
            hidden = [
                forward_rows(decoder, shape.text.vocab_size, attention, where, list(step), computed)
                for step in steps
            ]
            found.append(torch.cat(hidden).float())
    gaps = (found[0] - found[1]).abs()
    largest, mean = float(gaps.max()), float(gaps.mean())
    eps = torch.finfo(dtype).eps
    bounds = max(32 * eps, 1e-4), max(eps, 1e-5)
    said = f"largest gap {largest:.1e}, mean {mean:.1e} (tolerances {bounds[0]:.1e}, {bounds[1]:.1e})"
    return Verdict("fused layers beside plain ones", said, largest <= bounds[0] and mean <= bounds[1])


def forward_rows(
    decoder: AnyTextDecoder,
    vocab_size: int,
    attention: AttentionBackend,
    where: torch.device,
    step: Sequence[tuple[int, int]],
    computed: np.ndarray,
    with_features: int | None = None,
) -> torch.Tensor:
    """Run a step, and return its normed hidden states [t, width].

    `step`: (row, number of tokens) pairs for three rows with 30 blocks each. `computed` (int32 [3], updated
    in place): each row's number of computed tokens. `with_features`: the row that gets deepstack features
    after both layers.
    """
    rows, counts = (np.array(each, np.int32) for each in zip(*step, strict=True))
    table = 1 + np.arange(90, dtype=np.int32).reshape(3, 30)
    places = [np.arange(computed[row], computed[row] + count) for row, count in step]
    slots = [
        table[row][at // 16].astype(np.int64) * 16 + at % 16 for row, at in zip(rows, places, strict=True)
    ]
    computed[rows] += counts
    attention.begin(AttentionMeta(counts, computed[rows], np.concatenate(slots), table[rows]))
    positions = torch.from_numpy(np.concatenate(places)).to(where)
    embeds, deepstack = decoder.embed((positions * 7 + 5) % vocab_size), None
    if with_features in rows:
        is_own = torch.from_numpy(np.repeat(rows == with_features, counts)).to(where)[:, None]
        ramp = positions[:, None] + torch.arange(embeds.shape[1], device=where) * 0.7
        deepstack = (ramp.sin() * is_own).to(embeds.dtype).expand(2, -1, -1).contiguous()
    three = torch.stack((positions, positions // 2, positions // 3))
    return decoder.forward(embeds, deepstack, three, attention)


def compare_sampling(device: str, rows: int, vocab: int) -> Verdict:
    """Compare tokens sampled from the same logits on the CPU and on the device, for all kinds of sampling.

    The check allows a different token in 1 row per 500. The devices round `log` differently, which matters if
    the two highest scores are nearly equal.
    """
    random = np.random.default_rng(3)
    logits = torch.from_numpy(random.normal(0, 2.5, (rows, vocab)).astype(np.float32))
    drawn = []
    for where in (torch.device("cpu"), torch.device(device)):
        columns = RowColumns(rows, vocab, (), lambda ids, media: (np.zeros((3, len(ids)), np.int32), 0))
        sampler = Sampler(columns, rows, vocab, where)
        for row in range(rows):
            sampling = SamplingParams(seed=row * 977, **SAMPLINGS[row % len(SAMPLINGS)])
            request = Request(f"r{row}", np.array([1, 2], np.int32), sampling, sample_index=row % 3)
            admission = Admission(row, request, request.prompt_token_ids)
            columns.admit(admission)
            sampler.admit(admission)
        known = (2 + np.arange(rows) % 50).astype(np.int32)
        batch = SampleRows.of(columns, np.arange(rows, dtype=np.int32), known)
        drawn.append(sampler.sample(logits.to(where, copy=True), batch).token_ids.cpu())
    equal = int((drawn[0] == drawn[1]).sum())
    said = f"{equal} of {rows} equal, of a vocabulary of {vocab}"
    return Verdict(f"tokens drawn on {device} beside the CPU's", said, equal >= rows - rows // 500)

"""Check `batch_invariant` at real sizes: a row's logits have the same bits alone and in any batch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.kernels import forward_rows
from benchmarks.gpu.shapes import SHAPES, RandomWeights, reduced
from benchmarks.gpu.tokens import Verdict
from mmengine.models.config import make_spec
from mmengine.models.network import text_decoder
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.kv.pool import KVPool
from mmengine_qwen3_vl.config import ModelConfig

Steps = list[list[tuple[int, int]]]  # for each step: (row, number of tokens) pairs
DRAFTED = 4  # each row's last tokens, which are decoded one per step or verified together as drafts


def compare_bits(device: str, dtype: torch.dtype, dry: bool) -> Verdict:
    """Compare three rows' logits in batches with the logits when each row runs alone.

    The model has the 8B model's hidden size and vocabulary, but only two layers. The first row has deepstack
    image features. Raises ConfigError if the device does not support batch_invariant.
    """
    shape = reduced(SHAPES["8B"]) if dry else SHAPES["8B"]
    shape = replace(shape, text=replace(shape.text, num_layers=2))
    lengths = (9, 24, 40) if dry else (9, 83, 460)
    with torch.inference_mode():
        wanted, *found = _logits(shape, device, dtype, lengths, True)
        usual, *others = _logits(shape, device, dtype, lengths, False)
    names = list(companies(lengths))[1:]
    differ = [_num_different(one, wanted) for one in found]
    is_sound = bool(wanted.isfinite().all()) and float(wanted.std()) > 1e-3
    without = _said(names, [_num_different(one, usual) for one in others], sum(lengths))
    return Verdict(
        "equal bits, batched or alone",
        _said(names, differ, sum(lengths)),
        is_sound and not any(differ),
        [f"without batch_invariant: {without}"],
    )


def companies(lengths: Sequence[int]) -> dict[str, Steps]:
    """Return several ways to divide rows of these lengths into steps.

    The first way, "alone", runs one row per step.
    """
    rows = range(len(lengths))
    ones: Steps = [[(row, 1)] for row in rows]
    alone = [step for row in rows for step in ([(row, lengths[row] - DRAFTED)], *[ones[row]] * DRAFTED)]
    prompts = [(row, lengths[row] - DRAFTED) for row in rows]
    verified = [(row, DRAFTED) for row in reversed(rows)]
    chunks, left = [], list(lengths)
    while any(left):
        chunks.append([(row, min(left[row], (1, 5, 70)[row % 3])) for row in rows if left[row]])
        for row, count in chunks[-1]:
            left[row] -= count
    return {
        "alone": alone,
        "together": [prompts, *[[(row, 1) for row in rows]] * DRAFTED],
        "as drafts": [prompts[::-1], verified],
        "in chunks": chunks,
    }


def _logits(
    shape: ModelConfig, device: str, dtype: torch.dtype, lengths: Sequence[int], batch_invariant: bool
) -> list[torch.Tensor]:
    """Return a tensor [t, vocab] for each way in `companies`: all tokens' logits, ordered by row."""
    where, spec = torch.device(device), make_spec(shape)
    weights = RandomWeights(shape, where, dtype)
    decoder = text_decoder(shape.text, weights, where, dtype, batch_invariant=batch_invariant)
    found = []
    for steps in companies(lengths).values():
        pool = KVPool(spec, 100, 16, dtype, open_device(device))
        attention = make_backend("auto", spec, pool, batch_invariant=batch_invariant)
        computed, hidden = np.zeros(3, np.int32), [[] for _ in lengths]
        for step in steps:
            given = forward_rows(decoder, shape.text.vocab_size, attention, where, step, computed, 0)
            for (row, _), part in zip(step, given.split([count for _, count in step]), strict=True):
                hidden[row].append(decoder.logits(part))
        found.append(torch.cat([part for parts in hidden for part in parts]))
    return found


def _num_different(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one != other).any(-1).sum())


def _said(names: Sequence[str], differ: Sequence[int], count: int) -> str:
    parts = ", ".join(f"{number} {name}" for name, number in zip(names, differ, strict=True))
    return f"{count} tokens, different: {parts}"

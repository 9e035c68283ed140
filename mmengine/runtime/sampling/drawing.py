"""Draws tokens at random from logits, with a fused kernel or with separate torch operations.

The torch operations are the reference: the kernels must return the same tokens.
"""

from types import ModuleType

import numpy as np
import torch

from mmengine.runtime.device.upload import upload, upload_columns
from mmengine.runtime.rows import MIN_P, TOP_K, TOP_P, TYPICAL
from mmengine.runtime.sampling.drawing_cpu import UNSURE, draw_on_cpu
from mmengine.runtime.sampling.drawing_gpu import draw_on_gpu
from mmengine.runtime.sampling.filters import apply_temperature, keep_min_p, keep_top, keep_typical
from mmengine.runtime.sampling.gumbel import gumbel_noise
from mmengine.runtime.sampling.row_select import on_rows, take
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.topk import topk_tokens


def draw(
    logits: torch.Tensor, options: np.ndarray, batch: SampleRows, kernels: ModuleType | None
) -> torch.Tensor:
    """Return a token for each row, int64 [r]. `logits`: float32 [r, vocab_size].

    `batch`: the sampling parameters for each row, all with a temperature above 0. `options` [r]: bits for the
    features that each row uses (see rows.py). `kernels`: the module gpu.sampling_kernels, or None.
    """
    is_typical = (options & TYPICAL) != 0
    if is_typical.any():
        return _draw_typical(logits, options, batch, kernels, is_typical)
    if kernels is not None:
        return draw_on_gpu(kernels, logits, options, batch.columns, batch.output_index)
    drawn = draw_on_cpu(logits, batch.columns, batch.output_index) if logits.device.type == "cpu" else None
    if drawn is None:
        return _draw_by_steps(logits, options, batch)
    token_ids = torch.from_numpy(drawn.astype(np.int64))
    unsure = np.flatnonzero(drawn == UNSURE)
    if len(unsure):
        again = _draw_by_steps(take(logits, unsure), options[unsure], batch.take(unsure))
        token_ids[torch.from_numpy(unsure)] = again
    return token_ids


def _draw_typical(
    logits: torch.Tensor,
    options: np.ndarray,
    batch: SampleRows,
    kernels: ModuleType | None,
    is_typical: np.ndarray,
) -> torch.Tensor:
    """Do the same as `draw` if some rows use typical-p, which no kernel supports. `is_typical`: bool [r], the
    rows with typical-p.
    """
    token_ids = torch.empty(len(options), dtype=torch.int64, device=logits.device)
    others, typical = np.flatnonzero(~is_typical), np.flatnonzero(is_typical)
    if len(others):
        drawn = draw(take(logits, others), options[others], batch.take(others), kernels)
        token_ids[upload(others, logits.device)] = drawn
    drawn = _draw_by_steps(take(logits, typical), options[typical], batch.take(typical))
    token_ids[upload(typical, logits.device)] = drawn
    return token_ids


def _draw_by_steps(logits: torch.Tensor, options: np.ndarray, batch: SampleRows) -> torch.Tensor:
    columns, device = batch.columns, logits.device
    logits = apply_temperature(logits, upload_columns(columns["temperature"], device=device)[0])
    # Top-p without top-k sorts the whole vocabulary, so rows with top-k are filtered separately.
    for selected in (
        np.flatnonzero(options & TOP_K),
        np.flatnonzero((options & (TOP_K | TOP_P)) == TOP_P),
    ):
        if len(selected):
            logits = _keep_top(logits, selected, columns[selected])
    selected = np.flatnonzero(options & MIN_P)
    if len(selected):
        min_p = upload_columns(columns["min_p"][selected], device=device)[0]
        logits = on_rows(logits, selected, lambda some: keep_min_p(some, min_p))
    selected = np.flatnonzero(options & TYPICAL)
    if len(selected):
        typical_p = upload_columns(columns["typical_p"][selected], device=device)[0]
        logits = on_rows(logits, selected, lambda some: keep_typical(some, typical_p))
    noise = gumbel_noise(
        columns["seed"], columns["sample_index"], batch.output_index, logits.shape[1], device
    )
    return topk_tokens(noise.add_(logits))[1]


def _keep_top(logits: torch.Tensor, selected: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    asked = columns["top_k"].astype(np.int64)
    largest_k = int(asked.max())
    top_k = upload(asked, logits.device)[:, None]
    top_p = upload_columns(columns["top_p"], device=logits.device)[0]
    return on_rows(logits, selected, lambda some: keep_top(some, top_k, top_p, largest_k))

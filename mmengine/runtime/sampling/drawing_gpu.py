"""Samples tokens on a GPU, with the same results as filters.py and gumbel.py. Not yet run on a GPU.

The filters top-k, top-p and min-p become a single lower bound for each row's logits. A row's token must not
depend on its batch. Therefore the kernels sum probabilities themselves: torch's cumsum depends on the number
of rows, and torch's softmax depends on the batch's largest top_k. No function waits for the device.
"""

from types import ModuleType

import numpy as np
import torch

from mmengine.runtime.device.upload import upload
from mmengine.runtime.rows import TOP_K, TOP_P
from mmengine.runtime.sampling.filters import MIN_TEMPERATURE, apply_temperature


def draw_on_gpu(
    kernels: ModuleType,
    logits: torch.Tensor,
    options: np.ndarray,
    columns: np.ndarray,
    output_index: np.ndarray,
) -> torch.Tensor:
    """Return a sampled token for each row of `logits`, float32 [r, vocab_size], as int64 [r].

    `columns` [r]: the rows' sampling parameters, all with a temperature above 0. `options` [r]: bit flags for
    the filters that each row uses. `output_index` [r]: each output token's index, from 0. `kernels`: the
    module gpu.sampling_kernels.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.device
    with np.errstate(divide="ignore"):
        log_min_p = np.log(columns["min_p"])  # -inf turns min-p off
    heat = np.maximum(columns["temperature"], np.float32(MIN_TEMPERATURE))
    temperature, top_p, least = upload(np.stack((heat, columns["top_p"], log_min_p)), device)
    largest = logits.amax(-1)
    selected = np.flatnonzero(options & TOP_K)
    if len(selected):
        top_k = columns["top_k"][selected].astype(np.int64)
        index, counts = upload(np.stack((selected, top_k)), device)
        scaled = apply_temperature(logits[index], temperature[index, None])
        best = scaled.topk(int(top_k.max()), dim=-1).values
        least[index] = torch.maximum(least[index], kernels.top_k_bound(best, counts, top_p[index]))
    selected = np.flatnonzero((options & (TOP_K | TOP_P)) == TOP_P)
    if len(selected):
        index = upload(selected, device)
        found = kernels.top_p_bound(logits[index], largest[index], temperature[index], top_p[index])
        least[index] = torch.maximum(least[index], found)
    keys = (columns["seed"], output_index, columns["sample_index"])
    return kernels.draw(logits, largest, temperature, least, upload(np.stack(keys).astype(np.int64), device))

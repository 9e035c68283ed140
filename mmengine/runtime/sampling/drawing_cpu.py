"""Samples tokens with a C++ kernel, which returns the same tokens as filters.py and gumbel.py."""

import ctypes

import numpy as np
import torch

from mmengine.native import library

# Returned instead of a token if two scores are so close that torch's `log` might choose the other token.
UNSURE = -1


class _Draw(ctypes.Structure):
    """The C struct mm_draw, which native/src/sampling/sampling.h defines."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("temperature", "top_k", "top_p", "log_min_p", "seed", "output_index", "sample_index")
        ),
        ("tokens", ctypes.c_void_p),
    ]


def draw_on_cpu(logits: torch.Tensor, columns: np.ndarray, output_index: np.ndarray) -> np.ndarray | None:
    """Return int32 [r] with a token for each row in the float32 logits [r, vocab], or None if there is no
    kernel.

    For a row with the result UNSURE, the caller must use torch. `columns` [r]: the rows' sampling parameters,
    all with a temperature above 0.
    """
    kernels = library.load()
    if kernels is None:
        return None
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    log_min_p = torch.from_numpy(columns["min_p"].copy()).log().numpy()  # -inf turns min-p off
    tokens = np.empty(len(columns), dtype=np.int32)
    arrays = (
        columns["temperature"].copy(),
        columns["top_k"].copy(),
        columns["top_p"].copy(),
        log_min_p,
        columns["seed"].copy(),
        output_index.astype(np.int32),
        columns["sample_index"].copy(),
        tokens,
    )
    rows, vocab = logits.shape
    places = (array.ctypes.data for array in arrays)
    kernels.mm_draw_tokens(ctypes.byref(_Draw(rows, vocab, logits.data_ptr(), logits.stride(0), *places)))
    return tokens

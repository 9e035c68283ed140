"""Applies the grammars' token masks (one bit per token) to logits."""

import ctypes

import numpy as np
import torch

from mmengine.gpu.sampling import sampling_kernels
from mmengine.native import library
from mmengine.runtime.device.upload import upload
from mmengine.runtime.sampling.filters import NEVER
from mmengine.structured_output.rows.rows import Masks


class _Masks(ctypes.Structure):
    """The C struct mm_masks, which native/src/sampling/masking.h defines."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("bits", ctypes.c_void_p),
        ("words", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("writes", "tokens", "largest")),
    ]


def keep_allowed(
    logits: torch.Tensor, masks: Masks, is_read: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each masked row's largest allowed logit, float32 [m], and its token, int64 [m].

    Among equal logits, the lowest token id wins. The logit is -inf if no token is allowed, and undefined in a
    row with NaN. `is_read` (bool [m]): the rows that the caller reads later. In these rows, disallowed
    tokens' logits become -inf, in place. Other rows may stay unchanged. `logits`: float32 [s, vocab_size].
    """
    if logits.device.type != "cpu":
        return keep_allowed_on_gpu(logits, masks)
    kernels = library.load() if logits.stride(1) == 1 else None
    if kernels is None:
        return _keep_in_numpy(logits.numpy(), masks)
    tokens, largest = np.empty(len(masks.selected), np.int32), np.empty(len(masks.selected), np.float32)
    places, writes = masks.selected.astype(np.int64, copy=False), is_read.astype(np.uint8)
    arrays = (array.ctypes.data for array in (writes, tokens, largest))
    what = _Masks(
        len(tokens),
        logits.shape[1],
        logits.data_ptr(),
        logits.stride(0),
        places.ctypes.data,
        masks.bits.ctypes.data,
        masks.bits.shape[1],
        *arrays,
    )
    kernels.mm_keep_allowed(ctypes.byref(what))
    return torch.from_numpy(largest), torch.from_numpy(tokens.astype(np.int64))


def _keep_in_numpy(logits: np.ndarray, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = np.empty(len(masks.selected), np.int64)
    for index, (place, words) in enumerate(zip(masks.selected.tolist(), masks.bits, strict=True)):
        allowed = np.unpackbits(words.view(np.uint8), count=logits.shape[1], bitorder="little")
        np.copyto(logits[place], np.float32(NEVER), where=allowed == 0)
        tokens[index] = logits[place].argmax()
    return torch.from_numpy(logits[masks.selected, tokens]), torch.from_numpy(tokens)


def keep_allowed_on_gpu(logits: torch.Tensor, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `keep_allowed` on a GPU, without waiting for the device. Not yet run on a GPU."""
    places, bits = upload(masks.selected, logits.device), upload(masks.bits.view(np.int32), logits.device)
    kernels = sampling_kernels(logits.device)
    if kernels is not None and logits.stride(1) == 1:
        return kernels.keep_allowed(logits, places, bits)
    shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    kept = logits[places].masked_fill(~allowed, NEVER)
    logits[places] = kept
    return kept.max(dim=-1)

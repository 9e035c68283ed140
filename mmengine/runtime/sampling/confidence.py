"""Computes the probabilities of sampled tokens among the tokens that a grammar allows.

A probability is a softmax over the allowed tokens' logits at temperature 1, without penalties, biases and
filters.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from mmengine.native import library
from mmengine.runtime.device.upload import upload
from mmengine.runtime.rows import CONFIDENCE
from mmengine.runtime.sampling.filters import NEVER
from mmengine.runtime.sampling.row_select import take
from mmengine.runtime.sampling.topk import topk_tokens_of
from mmengine.structured_output.rows.rows import Masks
from mmengine.token_confidence import NUM_LIKELY


@dataclass(frozen=True, slots=True)
class AllowedWeights:
    """Statistics about the allowed tokens at m sampling positions. `indices`: the positions, on the host.
    `log_sum`: [m], the log of the softmax's denominator. `entropy`, `num_allowed`: [m]. `best`, `best_ids`:
    [m, k], the logits and ids of the k likeliest allowed tokens, in descending order. If fewer than k tokens
    are allowed, the remaining logits are -inf.
    """

    indices: np.ndarray
    log_sum: torch.Tensor
    entropy: torch.Tensor
    num_allowed: torch.Tensor
    best: torch.Tensor
    best_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Confidences:
    """The confidences at m sampling positions. Fields are as in AllowedWeights, but `best` contains logprobs.

    `chosen`: [m], the logprob of each chosen token.
    """

    indices: np.ndarray
    chosen: torch.Tensor
    entropy: torch.Tensor
    num_allowed: torch.Tensor
    best: torch.Tensor
    best_ids: torch.Tensor

    def to_host(self) -> "Confidences":
        tensors = (self.chosen, self.entropy, self.num_allowed, self.best, self.best_ids)
        return Confidences(self.indices, *(one.to("cpu", non_blocking=True) for one in tensors))


class _Allowed(ctypes.Structure):
    """The C struct mm_allowed, which native/src/sampling/confidence.h defines."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("bits", ctypes.c_void_p),
        ("words", ctypes.c_int32),
        ("likely", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("log_sum", "entropy", "num_allowed", "best", "best_tokens")),
    ]


def weigh_allowed(logits: torch.Tensor, masks: Masks, options: np.ndarray) -> AllowedWeights | None:
    """Return the AllowedWeights for rows with the option CONFIDENCE, or None without such rows.

    `logits`: float32 [s, vocab_size], for all s sampling positions. On a GPU, the logits must already be
    masked. Does not wait for the device.
    """
    is_wanted = (options[masks.selected] & CONFIDENCE) != 0
    if not is_wanted.any():
        return None
    places = masks.selected[is_wanted]
    if logits.device.type != "cpu":
        return _weigh(places, take(logits, places))
    bits = masks.bits if is_wanted.all() else masks.bits[is_wanted]
    kernels = library.load() if logits.stride(1) == 1 else None
    if kernels is None:
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        hidden = torch.from_numpy(allowed == 0)
        return _weigh(places, logits.index_select(0, torch.from_numpy(places)).masked_fill(hidden, NEVER))
    return _weigh_in_kernel(kernels, logits, places, bits)


def _weigh_in_kernel(
    kernels: ctypes.CDLL, logits: torch.Tensor, places: np.ndarray, bits: np.ndarray
) -> AllowedWeights:
    count, num_likely = len(places), min(NUM_LIKELY, logits.shape[1])
    log_sum, entropy = np.empty(count, np.float32), np.empty(count, np.float32)
    num_allowed = np.empty(count, np.int32)
    best, best_ids = np.empty((count, num_likely), np.float32), np.empty((count, num_likely), np.int32)
    bits, rows = np.ascontiguousarray(bits), places.astype(np.int64, copy=False)
    arrays = (log_sum, entropy, num_allowed, best, best_ids)
    what = _Allowed(
        count,
        logits.shape[1],
        logits.data_ptr(),
        logits.stride(0),
        rows.ctypes.data,
        bits.ctypes.data,
        bits.shape[1],
        num_likely,
        *(array.ctypes.data for array in arrays),
    )
    kernels.mm_weigh_allowed(ctypes.byref(what))
    return AllowedWeights(places, *(torch.from_numpy(array) for array in arrays))


def _weigh(places: np.ndarray, masked: torch.Tensor) -> AllowedWeights:
    """Return the AllowedWeights for logits [m, vocab_size]. Disallowed tokens must have -inf."""
    log_sum = masked.logsumexp(-1)
    logprobs = masked - log_sum[:, None]
    likelihoods = logprobs.exp()
    entropy = torch.where(likelihoods > 0, likelihoods * -logprobs, 0.0).sum(-1)
    num_allowed = masked.isfinite().sum(-1, dtype=torch.int32)
    best, best_ids = topk_tokens_of(masked, min(NUM_LIKELY, masked.shape[1]))
    return AllowedWeights(places, log_sum, entropy, num_allowed, best, best_ids)


def confidences_of(allowed: AllowedWeights, logits: torch.Tensor, token_ids: torch.Tensor) -> Confidences:
    """Return the confidences for the sampled tokens `token_ids` [s]. `logits`: [s, vocab_size]."""
    rows = upload(allowed.indices.astype(np.int64), logits.device)
    chosen = logits[rows, token_ids[rows].clamp(min=0)] - allowed.log_sum
    best = allowed.best - allowed.log_sum[:, None]
    return Confidences(allowed.indices, chosen, allowed.entropy, allowed.num_allowed, best, allowed.best_ids)

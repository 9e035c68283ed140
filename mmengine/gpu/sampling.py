"""Loads, checks and compiles the Triton sampling kernels. Not yet run on a GPU."""

from functools import cache
from types import ModuleType

import torch

from mmengine.errors import in_one_line
from mmengine.gpu import DEVICE_TYPES

_EXAMPLE = 70  # vocabulary size in the test of the kernels


def sampling_kernels(device: torch.device) -> ModuleType | None:
    """Return the module sampling_kernels, or None if the kernels do not run on `device` or give
    wrong tokens.
    """
    return _checked_kernels(device)[0] if device.type in DEVICE_TYPES else None


def compile_all(kernels: ModuleType, vocab_size: int, device: torch.device) -> None:
    """Run each kernel once with this vocabulary size, so that steps need not wait for the compilation."""
    logits, zero = torch.zeros(1, vocab_size, device=device), torch.zeros(1, device=device)
    keys = torch.zeros(3, 1, dtype=torch.int64, device=device)
    bits = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    kernels.top_p_bound(logits, zero, zero + 1, zero + 1)
    kernels.top_k_bound(logits[:, :2], keys[0] + 1, zero + 1)
    kernels.draw(logits, zero, zero + 1, zero, keys)
    kernels.log_softmax(logits)
    kernels.keep_allowed(logits, keys[0], bits)


def describe(device: torch.device) -> str:
    """Return which library samples on `device`. If torch samples on a GPU, the text includes the reason."""
    if device.type == "cpu":
        return "the CPU's kernels"
    return _checked_kernels(device)[1] if device.type in DEVICE_TYPES else "torch"


@cache
def _checked_kernels(device: torch.device) -> tuple[ModuleType | None, str]:
    try:
        import triton

        from mmengine.gpu import sampling_kernels

        if not gives_known_tokens(sampling_kernels, device):
            return None, f"torch (triton {triton.__version__} gives wrong tokens)"
    except Exception as error:  # e.g. no compiler, or an unsupported driver
        return None, f"torch ({in_one_line(error, 200)})"
    return sampling_kernels, f"triton {triton.__version__}"


def gives_known_tokens(kernels: ModuleType, device: torch.device) -> bool:
    """Run each kernel once on a small example and return whether all results are right.

    With equal logits, `draw` returns the argmax of the Gumbel noise. Among 70 tokens, seed 1, output index 2
    and sample index 3 give token 15 (runtime/sampling/gumbel.py).
    """
    logits, zero = torch.zeros(1, _EXAMPLE, device=device), torch.zeros(1, device=device)
    keys = torch.tensor([[1], [2], [3]], device=device)
    ramp = torch.arange(_EXAMPLE, device=device).float()[None]
    # The best token has probability 0.632, and the best two together have 0.865. So top_p 0.7 keeps two
    # tokens.
    least = kernels.top_p_bound(ramp, ramp.amax(-1), zero + 1, zero + 0.7)
    # With top_k 3, the best token has probability 0.665, and the best two have 0.910. So top_p 0.9 keeps two
    # tokens.
    among = kernels.top_k_bound(ramp.flip(1), keys[2], zero + 0.9)
    drawn = kernels.draw(logits, zero, zero + 1, zero - 1, keys)
    likely = kernels.log_softmax(ramp)[0]
    bits = torch.tensor([[0b1010, 0, 0]], dtype=torch.int32, device=device)
    largest, token = kernels.keep_allowed(ramp, zero.long(), bits)
    found = (float(least), float(among), int(drawn), float(largest), int(token), float(ramp.isfinite().sum()))
    sums_up = abs(float(likely.exp().sum()) - 1) < 1e-5 and abs(float(likely[-1] - likely[0]) - 69) < 1e-4
    return found == (-1.0, 68.0, 15, 3.0, 3, 2.0) and sums_up

"""Replaces a decoder's RMS norms by the CPU kernel, if a comparison shows that both compute the same."""

import ctypes
from itertools import product

import torch
from torch import Tensor, nn

from mmengine.native.norm import RmsNorm
from mmengine_transformers.packed import kernels_for

# Largest allowed difference between the kernel and the module, relative to the module's largest value in a
# row. In bfloat16, the limit allows a single different rounding.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
MAX_UNEQUAL = 0.02  # Largest share of bfloat16 values that may be rounded differently.


class FusedNorm(nn.Module):
    """Replaces a norm. Calls with further arguments or another dtype go to the original norm."""

    def __init__(self, norm: nn.Module, kernel: RmsNorm, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self._kernel, self._dtype = norm, kernel, dtype
        self.weight = norm.weight  # Some models read this attribute.

    def forward(self, x: Tensor, *others: object, **options: object) -> Tensor:
        if others or options or x.dtype != self._dtype:
            own: Tensor = self.norm(x, *others, **options)
            return own
        return self._kernel(x)

    __call__ = forward  # nn.Module.__call__ costs as much as the kernel, and these norms have no hooks.


def fuse_norms(decoder: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Replace all norms that the kernel can compute too. Return how many norms were replaced."""
    library = kernels_for(device, dtype)
    count = 0
    for parent in list(decoder.modules()) if library is not None else ():
        for name, module in list(parent.named_children()):
            kernel = kernel_for(library, module, dtype)
            if kernel is not None:
                setattr(parent, name, FusedNorm(module, kernel, dtype))
                count += 1
    return count


def kernel_for(library: ctypes.CDLL | None, module: nn.Module, dtype: torch.dtype) -> RmsNorm | None:
    """Return a kernel whose results equal the module's results on random rows, or None."""
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    names = [name for name, _ in module.named_parameters()]
    if library is None or eps is None or names != ["weight"] or list(module.buffers()):
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    # The first row is so small that eps determines its result.
    sizes = torch.tensor([eps**0.5, 0.1, 1.0, 30.0])[:, None]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, len(weight), generator=generator) * sizes).to(dtype)[None]
    try:
        own = module(x.clone())
    except (TypeError, ValueError, RuntimeError):  # The module needs other arguments.
        return None
    for offset, once in product((0.0, 1.0), (False, True)):
        kernel = RmsNorm(library, weight.float() + offset, eps, rounds_once=once)
        if _is_equal(kernel(x), own):
            return kernel
    return None


def _epsilon(module: nn.Module) -> float | None:
    """Return a norm's epsilon, or None for any other module."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _is_equal(found: Tensor, own: object) -> bool:
    if not isinstance(own, Tensor) or own.shape != found.shape or own.dtype != found.dtype:
        return False
    gaps = (found.float() - own.float()).abs()
    largest = own.float().abs().amax(-1, keepdim=True)
    unequal = float((found != own).float().mean()) if own.dtype == torch.bfloat16 else 0.0
    return bool((gaps <= LIMITS[own.dtype] * largest).all()) and unequal <= MAX_UNEQUAL

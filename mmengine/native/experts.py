"""Runs a mixture-of-experts layer with the CPU kernels (src/layers/experts.h)."""

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mmengine.native.feed_forward import Mixture
from mmengine.native.linear import (
    AnyWeight,
    Linear,
    PackedLinear,
    declare_functions,
    pack_rows,
    packed_buffer,
    structure,
)

_ALIKE = ("n", "k", "dtype", "form", "group", "mins", "x_form", "num_runs")


class ExpertsStruct(ctypes.Structure):
    """The C structure mm_experts."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("count", "top_k", "norm_top_k")),
        *(
            (name, Linear)
            for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate")
        ),
        ("hits", ctypes.c_void_p),
    )


class PackedExperts:
    """All experts' gate_up matrices, or all experts' down matrices, packed consecutively.

    `gate_up`: as in PackedLinear.

    Raises ValueError if the matrices differ in shape, dtype or code format.
    """

    def __init__(self, library: ctypes.CDLL, weights: Sequence[AnyWeight], *, gate_up: bool = False) -> None:
        self.count, self.c = len(weights), structure(weights[0])
        library = declare_functions(library)
        num_bytes = library.mm_linear_bytes(ctypes.addressof(self.c))
        self._packed = packed_buffer(num_bytes * self.count)
        self.c.packed = self._packed.ctypes.data
        for index, weight in enumerate(weights):
            one = structure(weight)
            one.packed = self._packed.ctypes.data + index * num_bytes
            if getattr(weight, "runs", ()) != getattr(weights[0], "runs", ()):
                raise ValueError(f"expert {index} and the first expert differ in block types")
            if any(getattr(one, name) != getattr(self.c, name) for name in _ALIKE):
                raise ValueError(f"expert {index} and the first expert differ in shape, dtype or code format")
            pack_rows(library, one, weight, one.n // 2 if gate_up else 0)


class Experts:
    """A mixture-of-experts layer on the kernels. `hits`: int64 [count], tokens routed to each expert so
    far.
    """

    def __init__(self, library: ctypes.CDLL, weights: Mixture[PackedLinear, PackedExperts]) -> None:
        self._library, self._weights = _declare_functions(library), weights
        self.hits = np.zeros(weights.gate_up.count, np.int64)
        self._hidden, self._dtype = weights.router.c.k, weights.router.dtype
        none, shared = Linear(), weights.shared
        self.c = ExpertsStruct(
            weights.gate_up.count,
            weights.top_k,
            weights.norm_top_k,
            *(each.c for each in (weights.router, weights.gate_up, weights.down)),
            *((none, none) if shared is None else (shared.gate_up.c, shared.down.c)),
            none if weights.shared_gate is None else weights.shared_gate.c,
            self.hits.ctypes.data,
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.c)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the experts' output [m, hidden] for x [m, hidden].

        x has contiguous rows and the weights' dtype. `residual`, a contiguous tensor with x's shape and
        dtype, is added to the output.
        """
        if x.shape[1:] != (self._hidden,) or x.dtype != self._dtype or x.stride(-1) != 1:
            raise ValueError(f"x is {list(x.shape)} {x.dtype}, wanted {self._dtype} [m, {self._hidden}]")
        y = torch.empty((len(x), self._hidden), dtype=self._dtype)
        added = None if residual is None else residual.data_ptr()
        failed = self._library.mm_experts_run(
            self.address, x.data_ptr(), x.stride(0), len(x), y.data_ptr(), self._hidden, added
        )
        if failed:
            raise MemoryError(f"not enough memory to run a mixture-of-experts layer on {len(x)} rows")
        return y


@cache
def _declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.mm_experts_run.argtypes = (pointer, pointer, long, number, pointer, long, pointer)
    library.mm_experts_run.restype = number
    return library

"""Describes a decoder to the CPU kernels: fills the C structures in src/decoder/decoder.h, and keeps their
arrays alive.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from mmengine.native.delta import DeltaSizes, DeltaSizesStruct, DeltaStruct
from mmengine.native.dtypes import DTYPES
from mmengine.native.experts import Experts
from mmengine.native.feed_forward import Dense
from mmengine.native.linear import Linear, PackedLinear

MAX_HEAD_DIM = 256  # the kernels' limit; torch computes larger heads
L = TypeVar("L")
F = TypeVar("F")


def fits(head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels can compute a decoder with this head size, device and dtype."""
    heads_fit = head_dim % 8 == 0 and 8 <= head_dim <= MAX_HEAD_DIM
    return device.type == "cpu" and dtype in DTYPES and heads_fit


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder's dimensions.

    `head_dim`: a multiple of 8, at most MAX_HEAD_DIM. `rotary_dim`: how many values of a head are rotated; 0:
    all. `gated`: qkv also computes a gate vector for each head of q, whose sigmoid multiplies the head's
    attention output. `norm_once`: a bfloat16 norm is rounded only after the multiplication by its weight.
    `delta`: dimensions of the gated delta nets; None for a decoder without delta nets.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rotary_dim: int = 0
    gated: bool = False
    norm_once: bool = False
    delta: DeltaSizes | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of heads in qkv's output: q, k, v and gates."""
        return self.num_heads * (2 if self.gated else 1) + 2 * self.num_kv_heads


class DeltaWeights(NamedTuple, Generic[L]):
    """The weights of a gated delta net, without its input and output projections."""

    ba: L  # hidden to 2 * heads; computes the inputs for beta and the decay
    conv: Tensor  # [taps, width]
    decay: Tensor  # float32 [heads], negative; the log decay is this value * softplus(input + dt_bias)
    dt_bias: Tensor  # float32 [heads]
    norm: Tensor  # [value_dim]


class LayerWeights(NamedTuple, Generic[L, F]):
    """The weights of a layer whose feed-forward network F is a Dense or a Mixture.

    Norms may have any float dtype. With `delta`, a gated delta net replaces attention: `qkv` then computes
    the convolution's inputs and the output gate, and `out` reads the net's output.
    """

    input_norm: Tensor  # [hidden]
    qkv: L  # hidden to (heads + 2 * kv_heads) * head_dim
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: norm weights of q's heads, then of k's
    out: L  # heads * head_dim to hidden
    post_norm: Tensor  # [hidden]
    feed_forward: F
    delta: DeltaWeights[L] | None = None


NativeLayer = LayerWeights[PackedLinear, Dense[PackedLinear] | Experts]


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("experts", "delta")),
    )


class DecoderStruct(ctypes.Structure):
    """The C structure mm_decoder."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_layers",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "dtype",
            )
        ),
        ("eps", ctypes.c_float),
        ("norm", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_int32) for name in ("rotary_dim", "gated", "norm_once")),
        ("delta", DeltaSizesStruct),
    )


class StepStruct(ctypes.Structure):
    """The C structure mm_decoder_step."""

    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_deepstack", ctypes.c_int32),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "embeds",
                "deepstack",
                "cos",
                "sin",
                "hidden",
                "qkv",
                "mixed",
                "normed",
                "product",
                "aux_rows",
            )
        ),
        ("aux_stride", ctypes.c_int64),
        ("aux_hidden_states", ctypes.c_void_p),
        ("num_aux_layers", ctypes.c_int32),
        ("states", ctypes.c_void_p),
        ("lora", ctypes.c_void_p),
    )


class DecoderWeights:
    """A decoder's weights as the C structure `c`, which is valid while this object lives.

    Raises ValueError for shapes and dtypes that the kernels do not support.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, layers: Sequence[NativeLayer], norm: Tensor) -> None:
        s = sizes
        if not fits(s.head_dim, norm.device, dtype):
            raise ValueError(f"the kernels do not support heads of {s.head_dim} values in {dtype}")
        self.sizes, self.dtype, self.num_layers = s, dtype, len(layers)
        self._weights = layers
        self._norms: list[Tensor] = []
        self._deltas: list[DeltaStruct] = []
        if s.delta is not None and not s.delta.fits:
            raise ValueError(f"no kernel for a delta net of {s.delta}")
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self.c = DecoderStruct(
            len(layers),
            s.hidden_size,
            s.intermediate_size,
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            DTYPES[dtype],
            s.eps,
            self._address(norm),
            self._layers,
            s.rotary_dim,
            s.gated,
            s.norm_once,
            DeltaSizesStruct(*astuple(s.delta)) if s.delta is not None else DeltaSizesStruct(),
        )

    def _layer(self, w: NativeLayer) -> _Layer:
        qk = w.qk_norm
        q_norm, k_norm = (None, None) if qk is None else (qk[0], qk[self.sizes.num_heads])
        norms = (w.input_norm, w.post_norm, q_norm, k_norm)
        after = w.feed_forward
        linears = [Linear(), Linear()] if isinstance(after, Experts) else [after.gate_up.c, after.down.c]
        experts = after.address if isinstance(after, Experts) else None
        parts = (w.qkv.c, w.out.c, *linears, experts, self._delta(w.delta))
        return _Layer(*map(self._address, norms), *parts)

    def _delta(self, w: DeltaWeights[PackedLinear] | None) -> int | None:
        if w is None:
            return None
        arrays = (w.conv, w.decay, w.dt_bias, w.norm)
        self._deltas.append(DeltaStruct(w.ba.c, *map(self._address, arrays)))
        return ctypes.addressof(self._deltas[-1])

    def has_delta(self, layer: int) -> bool:
        return self._weights[layer].delta is not None

    def _address(self, norm: Tensor | None) -> int | None:
        if norm is None:
            return None
        self._norms.append(norm.float().contiguous())
        return self._norms[-1].data_ptr()


class Scratch:
    """Scratch memory for a step's layers, sized for the largest step so far."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._sizes, self._dtype, self._room = weights.sizes, weights.dtype, 0

    def point(self, step: StepStruct, num_tokens: int) -> None:
        """Set the scratch fields in `step`. Grow the memory first if `num_tokens` needs more."""
        if num_tokens > self._room:
            self._grow(max(num_tokens, 2 * self._room))
        step.qkv, step.mixed = self.qkv.data_ptr(), self._mixed.data_ptr()
        step.normed, step.product = self._normed.data_ptr(), self._product.data_ptr()

    def _grow(self, room: int) -> None:
        s, self._room = self._sizes, room

        def rows(*shape: int) -> Tensor:
            return torch.empty((room, *shape), dtype=self._dtype)

        heads, mixed = s.num_rows * s.head_dim, s.num_heads * s.head_dim
        wide = 0 if s.delta is None else s.delta.width + s.delta.values
        whole = torch.empty(room * max(heads, wide), dtype=self._dtype)
        self.qkv = whole[: room * heads].view(room, s.num_rows, s.head_dim)
        self._mixed = rows(max(mixed, 0 if s.delta is None else s.delta.values))
        self._normed = rows(s.hidden_size)
        self._product = rows(s.intermediate_size)

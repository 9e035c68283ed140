"""All layers of a text decoder in kernels for CPUs: the structures of src/decoder.h, what they point to."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmengine.native.dtypes import DTYPES
from mmengine.native.linear import Linear, PackedLinear

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder. `head_dim` is a multiple of 8 up to MAX_HEAD_DIM."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms are vectors of any float dtype; `gate_up` is packed as such."""

    input_norm: Tensor  # [hidden]
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    post_norm: Tensor  # [hidden]
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
    )


class _Decoder(ctypes.Structure):
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
    )


class _Step(ctypes.Structure):
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
                "tapped",
            )
        ),
        ("tapped_stride", ctypes.c_int64),
        ("taps", ctypes.c_void_p),
        ("num_taps", ctypes.c_int32),
    )


class Decoder:
    """Runs steps, one at a time: scratch memory belongs to the decoder and grows with the largest step."""

    def __init__(
        self, library: ctypes.CDLL, sizes: Sizes, dtype: torch.dtype, layers: list[LayerWeights], norm: Tensor
    ) -> None:
        if dtype not in DTYPES or sizes.head_dim % 8 or not 8 <= sizes.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"no kernel for heads of {sizes.head_dim} in {dtype}")
        self._library, self._sizes, self._dtype = _declared(library), sizes, dtype
        self._weights = layers  # what the structures point to
        self._norms = [
            [norm.float().contiguous() for norm in (w.input_norm, w.post_norm, w.q_norm, w.k_norm)]
            for w in layers
        ]
        self._norm = norm.float().contiguous()
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(
                    *(norm.data_ptr() for norm in norms), *(p.c for p in (w.qkv, w.out, w.gate_up, w.down))
                )
                for w, norms in zip(layers, self._norms, strict=True)
            )
        )
        s = sizes
        self._decoder = _Decoder(
            len(layers),
            s.hidden_size,
            s.intermediate_size,
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            DTYPES[dtype],
            s.eps,
            self._norm.data_ptr(),
            self._layers,
        )
        self._c = ctypes.addressof(self._decoder)
        self._step = _Step()
        self._c_step = ctypes.addressof(self._step)
        self._room = 0

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attention: Any,
        tapped: tuple[Sequence[int], Tensor] | None = None,
    ) -> Tensor:
        """embeds [t, hidden], deepstack [n, t, hidden] or None, cos and sin float32 [t, head_dim / 2]
        to normed hidden states [t, hidden]. `attention` is an AttentionPort; one with a `step_address`
        keeps its cache where the kernels read it themselves. `tapped`: n layers, and [t, n * hidden] with
        contiguous rows, to which what enters them is written; one beyond the last is the final norm."""
        num_tokens = len(embeds)
        self._make_room(num_tokens)
        embeds = embeds.contiguous()
        hidden = torch.empty_like(embeds)
        step = self._step
        step.num_tokens = num_tokens
        step.embeds, step.hidden = embeds.data_ptr(), hidden.data_ptr()
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.num_deepstack = 0
        if deepstack is not None:
            deepstack = deepstack.contiguous()
            step.num_deepstack, step.deepstack = len(deepstack), deepstack.data_ptr()
        step.num_taps = 0
        if tapped is not None:
            layers, rows = (ctypes.c_int32 * len(tapped[0]))(*tapped[0]), tapped[1]
            self._check_tapped(layers, rows, embeds)
            step.num_taps, step.taps = len(layers), ctypes.addressof(layers)
            step.tapped, step.tapped_stride = rows.data_ptr(), rows.stride(0)
        if hasattr(attention, "step_address"):
            self._run_at_once(attention)
        else:
            self._run_in_halves(attention)
        return hidden

    def _check_tapped(self, layers: Sequence[int], rows: Tensor, embeds: Tensor) -> None:
        """Kernels write to an address: ValueError for what would not hold it."""
        if not all(0 <= layer <= len(self._layers) for layer in layers):
            raise ValueError(f"tapped layers {list(layers)} are not all of 0 to {len(self._layers)}")
        wanted = (len(embeds), len(layers) * self._sizes.hidden_size)
        if rows.shape != wanted or rows.dtype != embeds.dtype or (rows.numel() and rows.stride(1) != 1):
            raise ValueError(f"tapped rows are {list(rows.shape)} {rows.dtype}, wanted {list(wanted)}")

    def _run_at_once(self, attention: Any) -> None:
        _check(
            self._library.mm_decoder_forward(
                self._c, self._c_step, attention.step_address(), attention.layers_address()
            )
        )

    def _run_in_halves(self, attention: Any) -> None:
        s, num_tokens = self._sizes, self._step.num_tokens
        q, k, v = self._qkv[:num_tokens].split((s.num_heads, s.num_kv_heads, s.num_kv_heads), 1)
        for layer in range(len(self._layers)):
            _check(self._library.mm_decoder_before_attention(self._c, self._c_step, layer))
            attention.append(layer, k, v)
            mixed = attention.run(layer, q).reshape(num_tokens, -1)
            _check(
                self._library.mm_decoder_after_attention(
                    self._c, self._c_step, layer, mixed.data_ptr(), mixed.stride(0)
                )
            )
        self._library.mm_decoder_final_norm(self._c, self._c_step)

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens <= self._room:
            return
        s, self._room = self._sizes, max(num_tokens, 2 * self._room)

        def scratch(*shape: int) -> Tensor:
            return torch.empty((self._room, *shape), dtype=self._dtype)

        self._qkv = scratch(s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        self._mixed = scratch(s.num_heads, s.head_dim)
        self._normed = scratch(s.hidden_size)
        self._product = scratch(s.intermediate_size)
        step = self._step
        step.qkv, step.mixed = self._qkv.data_ptr(), self._mixed.data_ptr()
        step.normed, step.product = self._normed.data_ptr(), self._product.data_ptr()


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the linear layers or the attention of this step")


@cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    library.mm_decoder_before_attention.argtypes = (pointer, pointer, number)
    library.mm_decoder_after_attention.argtypes = (pointer, pointer, number, pointer, ctypes.c_int64)
    library.mm_decoder_final_norm.argtypes = (pointer, pointer)
    library.mm_decoder_forward.argtypes = (pointer,) * 4
    for name in ("forward", "before_attention", "after_attention"):
        getattr(library, f"mm_decoder_{name}").restype = number
    library.mm_decoder_final_norm.restype = None
    return library

"""Runs the layers of a text decoder with the CPU kernels (src/decoder/decoder.h)."""

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmengine.native.decoder_weights import DecoderWeights, NativeLayer, Scratch, Sizes, StepStruct
from mmengine.native.delta import StateStep
from mmengine.native.lora import DECODER_LINEARS, LoraStep


class Decoder:
    """A text decoder that computes one step per call. Its scratch memory grows with the largest step."""

    def __init__(
        self,
        library: ctypes.CDLL,
        sizes: Sizes,
        dtype: torch.dtype,
        layers: Sequence[NativeLayer],
        norm: Tensor,
    ) -> None:
        self._weights = DecoderWeights(sizes, dtype, layers, norm)
        self._library, self._sizes = declare_functions(library), sizes
        self._c = ctypes.addressof(self._weights.c)
        self._step = StepStruct()
        self._c_step = ctypes.addressof(self._step)
        self._scratch = Scratch(self._weights)

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attention: Any,
        aux_rows: tuple[Sequence[int], Tensor] | None = None,
        states: StateStep | None = None,
        lora: LoraStep | None = None,
    ) -> Tensor:
        """Return the normed hidden states [t, hidden] for `embeds` [t, hidden].

        `deepstack`: None, or [n, t, hidden]; `deepstack[i]` is added to layer i's output. `cos`, `sin`:
        float32 [t, rotary_dim / 2]. `attention`: an AttentionPort. If the port has a `step_address`, the
        kernels read and write the KV cache themselves. `aux_rows`: n layer indices, and an output tensor [t,
        n * hidden] with contiguous rows for these layers' inputs. The index num_layers means the final norm's
        input.
        `states`: required by a decoder with delta nets, refused by all others. `lora`: adapters for the
        linear layers, in the order of DECODER_LINEARS within each layer.
        """
        if (states is None) != (self._sizes.delta is None):
            raise ValueError(
                "a decoder with delta nets requires states, and a decoder without delta nets takes none"
            )
        num_tokens = len(embeds)
        embeds = embeds.contiguous()
        hidden = torch.empty_like(embeds)
        step = self._step
        self._scratch.point(step, num_tokens)
        step.num_tokens = num_tokens
        step.embeds, step.hidden = embeds.data_ptr(), hidden.data_ptr()
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.num_deepstack = 0
        if deepstack is not None:
            deepstack = deepstack.contiguous()
            step.num_deepstack, step.deepstack = len(deepstack), deepstack.data_ptr()
        step.num_aux_layers = 0
        if aux_rows is not None:
            layers, rows = (ctypes.c_int32 * len(aux_rows[0]))(*aux_rows[0]), aux_rows[1]
            self._check_aux_rows(aux_rows[0], rows, embeds)
            step.num_aux_layers, step.aux_hidden_states = len(layers), ctypes.addressof(layers)
            step.aux_rows, step.aux_stride = rows.data_ptr(), rows.stride(0)
        step.states = None if states is None else ctypes.addressof(states.c)
        if lora is not None and lora.num_linears != len(DECODER_LINEARS) * self._weights.num_layers:
            raise ValueError(
                f"adapters for {lora.num_linears} linear layers do not fit this decoder's layers"
            )
        step.lora = None if lora is None else lora.address
        if hasattr(attention, "step_address"):
            self._run_at_once(attention)
        else:
            self._run_in_halves(attention)
        return hidden

    def _check_aux_rows(self, layers: Sequence[int], rows: Tensor, embeds: Tensor) -> None:
        """Raise ValueError for a wrong layer, shape or dtype, because the kernels write to a raw address."""
        if not all(0 <= layer <= self._weights.num_layers for layer in layers):
            raise ValueError(f"auxiliary layers {list(layers)} must be in 0 to {self._weights.num_layers}")
        wanted = (len(embeds), len(layers) * self._sizes.hidden_size)
        if rows.shape != wanted or rows.dtype != embeds.dtype or (rows.numel() and rows.stride(1) != 1):
            raise ValueError(f"auxiliary rows are {list(rows.shape)} {rows.dtype}, wanted {list(wanted)}")

    def _run_at_once(self, attention: Any) -> None:
        check(
            self._library.mm_decoder_forward(
                self._c, self._c_step, attention.step_address(), attention.layers_address()
            )
        )

    def _run_in_halves(self, attention: Any) -> None:
        s, num_tokens = self._sizes, self._step.num_tokens
        heads = self._scratch.qkv[:num_tokens]
        q, k, v, _ = heads.tensor_split(tuple(accumulate((s.num_heads, s.num_kv_heads, s.num_kv_heads))), 1)
        place = 0  # the layer's index among the attention layers
        for layer in range(self._weights.num_layers):
            if self._weights.has_delta(layer):
                check(self._library.mm_decoder_delta_layer(self._c, self._c_step, layer, layer - place))
                continue
            check(self._library.mm_decoder_before_attention(self._c, self._c_step, layer))
            attention.append(place, k, v)
            mixed = attention.run(place, q).reshape(num_tokens, -1)
            place += 1
            check(
                self._library.mm_decoder_after_attention(
                    self._c, self._c_step, layer, mixed.data_ptr(), mixed.stride(0)
                )
            )
        self._library.mm_decoder_final_norm(self._c, self._c_step)


def check(failed: int) -> None:
    if failed:
        raise MemoryError("not enough memory for the linear layers or the attention of this step")


@cache
def declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    library.mm_decoder_before_attention.argtypes = (pointer, pointer, number)
    library.mm_decoder_delta_layer.argtypes = (pointer, pointer, number, number)
    library.mm_decoder_after_attention.argtypes = (pointer, pointer, number, pointer, ctypes.c_int64)
    library.mm_decoder_final_norm.argtypes = (pointer, pointer)
    library.mm_decoder_forward.argtypes = (pointer,) * 4
    for name in ("forward", "before_attention", "after_attention", "delta_layer"):
        getattr(library, f"mm_decoder_{name}").restype = number
    library.mm_decoder_final_norm.restype = None
    return library

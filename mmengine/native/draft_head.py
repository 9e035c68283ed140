"""Runs an EAGLE-3 draft head with the CPU kernels (src/decoder/draft_head.h)."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmengine.native.decoder import check, declare_functions
from mmengine.native.decoder_weights import DecoderStruct, DecoderWeights, Scratch, StepStruct
from mmengine.native.linear import Linear, PackedLinear

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int32


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Weights and sizes of the head, apart from its decoder layers.

    `scores`: the packed LM head, or None. A call that drafts a whole chain (consecutive tokens) needs
    `scores` and `embedding`.
    """

    embed_size: int
    aux_size: int
    norm_before_residual: bool
    norm_output: bool
    fc: PackedLinear
    fc_norms: tuple[Tensor, ...]  # empty; or one norm for all auxiliary states; or one per state
    embed_norm: Tensor  # [embed_size]
    hidden_norm: Tensor  # [hidden]
    scores: PackedLinear | None
    embedding: Tensor | None  # [vocab_size, embed_size]
    target_ids: Tensor | None  # int64 [draft_vocab_size], draft id to target id; None: ids are equal


@dataclass(frozen=True, slots=True)
class ChainPlaces:
    """The KV cache positions for n rows' chains. Rows are sorted by descending `most`.

    `most`, `kv_lens` and `positions` are contiguous int32 [n].
    """

    most: np.ndarray  # maximum number of drafts for the row, at least 1
    kv_lens: np.ndarray  # tokens in the KV cache
    positions: np.ndarray  # position of the first token that is not cached
    table: np.ndarray  # block table, int32 [n, b] with contiguous rows; covers kv_lens + most - 1 tokens
    block_size: int


class _Head(ctypes.Structure):
    _fields_ = (
        ("decoder", DecoderStruct),
        *((name, _NUMBER) for name in ("embed_size", "vocab_size", "draft_vocab_size")),
        *((name, _NUMBER) for name in ("norm_before_residual", "norm_output")),
        *((name, _NUMBER) for name in ("num_aux_layers", "aux_size", "num_fc_norms")),
        *((name, _ADDRESS) for name in ("fc_norms", "embed_norm", "hidden_norm")),
        ("fc", Linear),
        ("scores", Linear),
        *((name, _ADDRESS) for name in ("embedding", "target_ids")),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        ("rows", StepStruct),
        *((name, _ADDRESS) for name in ("hidden", "embeds", "inputs", "stream", "z")),
    )


class _Chain(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("num_rows", "max_drafts")),
        *((name, _ADDRESS) for name in ("most", "kv_lens", "positions", "block_table")),
        *((name, _NUMBER) for name in ("table_stride", "block_size")),
        *(
            (name, _ADDRESS)
            for name in ("table_cos", "table_sin", "z", "carry", "logits", "drafts", "embeds")
        ),
        *((name, _ADDRESS) for name in ("cos", "sin", "lens", "slots")),
    )


class _ChainRoom:
    """Buffers for chains of up to `num_rows` rows."""

    def __init__(
        self,
        num_rows: int,
        draft_vocab_size: int,
        embed_size: int,
        hidden_size: int,
        half: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_rows = num_rows
        self.inputs = torch.empty((num_rows, embed_size + hidden_size), dtype=dtype)
        self.carry, self.z, self.stream = torch.empty((3, num_rows, hidden_size), dtype=dtype).unbind()
        self._embeds = torch.empty((num_rows, embed_size), dtype=dtype)
        self._logits = torch.empty(num_rows, draft_vocab_size)
        self._angles = torch.empty(2, num_rows, half)
        self._lens, self._slots = np.empty(2 * num_rows + 1, np.int32), np.empty(num_rows, np.int64)
        self.c = _Chain(
            carry=self.carry.data_ptr(),
            logits=self._logits.data_ptr(),
            embeds=self._embeds.data_ptr(),
            cos=self._angles[0].data_ptr(),
            sin=self._angles[1].data_ptr(),
            lens=self._lens.ctypes.data,
            slots=self._slots.ctypes.data,
        )
        self.address = ctypes.addressof(self.c)


class NativeHead:
    """An EAGLE-3 head that runs single passes and whole chains of drafts. Calls must not overlap, because all
    calls share scratch memory.
    """

    def __init__(self, library: ctypes.CDLL, weights: DecoderWeights, parts: HeadParts) -> None:
        self._library, self._weights, self._parts = _declare_functions(library), weights, parts
        self._hidden_size, self._dtype = weights.sizes.hidden_size, weights.dtype
        norms = [torch.cat(parts.fc_norms)] if parts.fc_norms else []
        norms += [parts.embed_norm, parts.hidden_norm]
        self._norms = [norm.float().contiguous() for norm in norms]
        fc_norms, embed_norm, hidden_norm = [None] * (3 - len(norms)) + [n.data_ptr() for n in self._norms]
        embedding = parts.embedding
        self._head = _Head(
            weights.c,
            parts.embed_size,
            0 if embedding is None else len(embedding),
            0 if parts.scores is None else parts.scores.c.n,
            parts.norm_before_residual,
            parts.norm_output,
            parts.fc.c.k // parts.aux_size,
            parts.aux_size,
            len(parts.fc_norms),
            fc_norms,
            embed_norm,
            hidden_norm,
            parts.fc.c,
            Linear() if parts.scores is None else parts.scores.c,
            None if embedding is None else embedding.data_ptr(),
            None if parts.target_ids is None else parts.target_ids.data_ptr(),
        )
        self._pass = _Pass()
        self._c, self._c_pass = ctypes.addressof(self._head), ctypes.addressof(self._pass)
        self._c_rows = self._c_pass + _Pass.rows.offset
        self._scratch = Scratch(weights)
        self._inputs = torch.empty(0)
        self._chains: _ChainRoom | None = None

    @property
    def can_chain(self) -> bool:
        return self._parts.scores is not None and self._parts.embedding is not None

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Project auxiliary states [t, num_aux_layers * aux_size] with contiguous rows to [t, hidden]."""
        wide = self._parts.fc.c.k
        if (
            aux_hidden_states.shape != (len(aux_hidden_states), wide)
            or aux_hidden_states.dtype != self._dtype
            or aux_hidden_states.stride(1) != 1
        ):
            raise ValueError(
                f"auxiliary states are {list(aux_hidden_states.shape)} {aux_hidden_states.dtype}, "
                f"wanted [t, {wide}] {self._dtype}"
            )
        out = aux_hidden_states.new_empty(len(aux_hidden_states), self._hidden_size)
        scratch = (
            torch.empty_like(aux_hidden_states, memory_format=torch.contiguous_format)
            if self._parts.fc_norms
            else out
        )
        check(
            self._library.mm_draft_fuse(
                self._c,
                aux_hidden_states.data_ptr(),
                aux_hidden_states.stride(0),
                len(aux_hidden_states),
                scratch.data_ptr(),
                out.data_ptr(),
            )
        )
        return out

    def forward(
        self, hidden: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, attention: Any, first_layer: int
    ) -> tuple[Tensor, Tensor]:
        """Return the final norm's output (z) and input (the residual stream), [t, hidden] each.

        `hidden`: [t, hidden]. `embeds`: [t, embed_size], embeddings of the next tokens. `cos`, `sin`: float32
        [t, head_dim / 2]. `attention`: as in Decoder.forward. `first_layer`: index of the head's first layer
        in the KV cache.
        """
        hidden, embeds = hidden.contiguous(), embeds.contiguous()
        z, stream = self._point(len(hidden))
        step = self._pass
        step.rows.num_tokens = len(hidden)
        step.rows.cos, step.rows.sin = cos.data_ptr(), sin.data_ptr()
        step.hidden, step.embeds = hidden.data_ptr(), embeds.data_ptr()
        if hasattr(attention, "step_address"):
            layers = attention.layers_address() + first_layer * ctypes.sizeof(_ADDRESS)
            check(self._library.mm_draft_forward(self._c, self._c_pass, attention.step_address(), layers))
        else:
            self._run_in_halves(attention, first_layer)
        return z, stream

    def _run_in_halves(self, attention: Any, first_layer: int) -> None:
        s, num_tokens = self._weights.sizes, self._pass.rows.num_tokens
        q, k, v = self._scratch.qkv[:num_tokens].split((s.num_heads, s.num_kv_heads, s.num_kv_heads), 1)
        for layer in range(self._weights.num_layers):
            if layer == 0:
                check(self._library.mm_draft_begin(self._c, self._c_pass))
            else:
                check(self._library.mm_decoder_before_attention(self._c, self._c_rows, layer))
            attention.append(first_layer + layer, k, v)
            mixed = attention.run(first_layer + layer, q).reshape(num_tokens, -1)
            check(
                self._library.mm_decoder_after_attention(
                    self._c, self._c_rows, layer, mixed.data_ptr(), mixed.stride(0)
                )
            )
        self._library.mm_draft_end(self._c, self._c_pass)

    def chain(
        self,
        z: Tensor,
        carry: Tensor,
        places: ChainPlaces,
        drafts: Tensor,
        tables: tuple[Tensor, Tensor],
        layers_address: int,
    ) -> Tensor:
        """Draft greedily for n rows, fill in `drafts` and return `drafts`.

        `drafts`: contiguous int64 [max(most), n]. Each column is a row's chain. Negative entries are replaced
        by drafts, at most `most` per row. Other entries are tokens that the caller has drafted. `z`: [n,
        hidden], the final norm's output for each row's last token. `carry`: [n, hidden], the hidden state
        that the next pass reads. `tables`: cos and sin for all positions up to the largest in use.
        `layers_address`: address of an array with the KV pool's address for each head layer.
        """
        num_rows = len(z)
        room = self._chain_room(num_rows)
        z = z.contiguous()
        room.carry[:num_rows] = carry
        chain = room.c
        chain.num_rows, chain.max_drafts = num_rows, len(drafts)
        chain.most, chain.kv_lens = places.most.ctypes.data, places.kv_lens.ctypes.data
        chain.positions, chain.block_table = places.positions.ctypes.data, places.table.ctypes.data
        chain.table_stride, chain.block_size = places.table.strides[0] // 4, places.block_size
        chain.table_cos, chain.table_sin = (table.data_ptr() for table in tables)
        chain.z, chain.drafts = z.data_ptr(), drafts.data_ptr()
        step = self._pass
        self._scratch.point(step.rows, num_rows)
        step.inputs, step.z, step.stream = room.inputs.data_ptr(), room.z.data_ptr(), room.stream.data_ptr()
        check(self._library.mm_draft_run_chain(self._c, room.address, self._c_pass, layers_address))
        return drafts

    def _chain_room(self, num_rows: int) -> "_ChainRoom":
        if self._chains is None or num_rows > self._chains.num_rows:
            sizes, scores = self._weights.sizes, self._parts.scores
            assert scores is not None  # callers check `can_chain`
            self._chains = _ChainRoom(
                max(num_rows, 2 * (self._chains.num_rows if self._chains else 0)),
                scores.c.n,
                self._parts.embed_size,
                self._hidden_size,
                sizes.head_dim // 2,
                self._dtype,
            )
        return self._chains

    def _point(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Set the pass's buffers for `num_tokens` tokens. Return the buffers z and stream."""
        step, parts = self._pass, self._parts
        if num_tokens > len(self._inputs):
            room = max(num_tokens, 2 * len(self._inputs))
            self._inputs = torch.empty((room, parts.embed_size + self._hidden_size), dtype=self._dtype)
        self._scratch.point(step.rows, num_tokens)
        z, stream = torch.empty((2, num_tokens, self._hidden_size), dtype=self._dtype).unbind()
        step.inputs, step.z, step.stream = self._inputs.data_ptr(), z.data_ptr(), stream.data_ptr()
        return z, stream


@cache
def _declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    declare_functions(library)
    long = ctypes.c_int64
    library.mm_draft_fuse.argtypes = (_ADDRESS, _ADDRESS, long, _NUMBER, _ADDRESS, _ADDRESS)
    library.mm_draft_forward.argtypes = library.mm_draft_run_chain.argtypes = (_ADDRESS,) * 4
    library.mm_draft_begin.argtypes = library.mm_draft_end.argtypes = (_ADDRESS,) * 2
    library.mm_draft_end.restype = None
    for name in ("fuse", "forward", "run_chain", "begin"):
        getattr(library, f"mm_draft_{name}").restype = _NUMBER
    return library

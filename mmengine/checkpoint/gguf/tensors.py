"""Reads the tensors of a GGUF file under their canonical names, as float32 rows or as rows of integer
codes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mmengine.checkpoint.files import read_range
from mmengine.checkpoint.gguf.container import Container, StoredTensor
from mmengine.checkpoint.gguf.types import BLOCKS, StoredType
from mmengine.checkpoint.tensors import Blocks, CodedRows, Coding, TensorEntry
from mmengine.errors import ModelError

# Factors for rotary frequencies. The tensor is skipped, because the config's `rope_parameters` contain the
# factors.
ROPE_FACTORS = "rope_freqs.weight"
PIECE_VALUES = 2**20  # Number of values decoded at once: 4 MiB of float32.
# GGUF name -> transformers name for the tensors of a layer. Other names stay unchanged.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# GGUF name -> transformers name for a layer's tensors. These transformers names have no suffix `.weight` or
# `.bias`.
_NAMED = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
# GGUF name -> transformers name for the tensors of a multi-token-prediction head.
_HEAD = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
    "embed_tokens": "embed_tokens",
    "shared_head_head": "shared_head",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
MAX_EXPERTS = 1024  # Maximum number of experts in a layer.
MAX_MATRICES = 2**17  # Maximum number of expert matrices in a file; the largest models have 40,000.
_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NAMED_LAYER = re.compile(r"blk\.(\d+)\.(ssm_a|ssm_dt\.bias)")
_HEAD_LAYER = re.compile(r"blk\.\d+\.nextn\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class GGUFEntry(TensorEntry):
    """A tensor in a GGUF file, with methods that decode it.

    `paired_heads`: the number of heads (d rows each) if the file stores a head's rows in the order 0, d/2, 1,
    d/2 + 1, …; else 0. The methods return the rows in the order 0, 1, 2, …, as in safetensors files.
    `adjust`: how `pieces` changes a vector's stored values.
    """

    type: StoredType
    paired_heads: int = 0
    adjust: Literal["", "less one", "log of the negative"] = ""

    @property
    def is_decoded(self) -> bool:
        return True

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows [begin, end) along the first dimension, in chunks.

        A chunk is (index of the first row, relative to `begin`; values, float32 [n, *shape[1:]]). Raises
        ModelError if the file cannot be read.
        """
        row_values = self.num_values // self.shape[0]
        if row_values % self.type.values:  # A vector's row is a single value, not a whole block.
            yield 0, self._read(0, self.num_values)[self._order()[begin:end]]
            return
        step, order = max(1, PIECE_VALUES // row_values), self._order()
        for first in range(begin, end, step):
            stored = order[first : min(first + step, end)]
            low, high = int(stored.min()), int(stored.max()) + 1
            rows = self._read(low * row_values, high * row_values).reshape(high - low, *self.shape[1:])
            yield first - begin, rows[stored - low] if self.paired_heads else rows

    @property
    def coding(self) -> Coding | None:
        """Return the coding of a matrix whose rows are whole blocks, or None for any other tensor."""
        whole = len(self.shape) == 2 and self.shape[1] % self.type.values == 0
        return self.type.coding if whole else None

    @property
    def blocks(self) -> Blocks | None:
        whole = len(self.shape) == 2 and self.shape[1] % self.type.values == 0
        return BLOCKS.get(self.type.name) if whole else None

    def block_rows(self, begin: int, end: int, signed: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        k, order = self.shape[1], self._order()
        step = max(1, PIECE_VALUES // k)
        for first in range(begin, end, step):
            stored = order[first : min(first + step, end)]
            low, high = int(stored.min()), int(stored.max()) + 1
            found = self._stored(low * k, high * k)
            for at in BLOCKS[self.type.name].halves:
                bits = np.ascontiguousarray(found[:, at : at + 2]).view("<u2")
                if bool(((bits & 0x7C00) == 0x7C00).any()):
                    raise self._wrong("holds a scale that is not finite")
            if signed and self.type.name == "Q8_0":
                self._check_signed(found[:, 2:])
            yield first - begin, found.reshape(high - low, -1)[stored - low]

    def _check_signed(self, codes: np.ndarray) -> None:
        """Raise ModelError if Q8_0 codes include -128 (the byte 0x80)."""
        if bool((codes.view(np.uint8) == 0x80).any()):
            raise self._wrong("holds -128, which is not a Q8_0 code")

    def coded(self, begin: int, end: int) -> Iterator[tuple[int, CodedRows]]:
        k = self.shape[1]
        step, order = max(1, PIECE_VALUES // k), self._order()
        for first in range(begin, end, step):
            stored = order[first : min(first + step, end)]
            low, high = int(stored.min()), int(stored.max()) + 1
            assert self.type.codes is not None
            with np.errstate(over="ignore", invalid="ignore"):
                found = self.type.codes(self._stored(low * k, high * k))
            yield first - begin, self._rows(found, stored - low, k)

    def _rows(self, found: CodedRows, places: np.ndarray, k: int) -> CodedRows:
        """Return the rows with the indices `places`, in this order, each with `k` codes. Raises ModelError
        for values that no GGUF writer produces.
        """
        if self.type.coding == Coding("int8", 32):
            self._check_signed(found.codes)
        shared = [None if each is None else each.reshape(-1, k // 32)[places] for each in found[1:]]
        if not all(each is None or bool(np.isfinite(each).all()) for each in shared):
            raise self._wrong("holds a scale that is not finite")
        assert shared[0] is not None
        return CodedRows(found.codes.reshape(-1, k)[places], shared[0], shared[1])

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {self.stored_name} {what}; download it again")

    @property
    def num_values(self) -> int:
        return self.num_bytes // self.type.bytes * self.type.values

    def _order(self) -> np.ndarray:
        """Return each row's index in the file, int64 [rows]."""
        places = np.arange(self.shape[0])
        return (
            places.reshape(self.paired_heads, -1, 2).swapaxes(1, 2).reshape(-1)
            if self.paired_heads
            else places
        )

    def _read(self, begin: int, end: int) -> np.ndarray:
        """Return the values [begin, end), which must be whole blocks, as writable float32 [end - begin]."""
        # Suppress numpy's warnings about damaged scales, which may overflow or be NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.type.decode(self._stored(begin, end)).reshape(-1)
        # Stored float32 values are a read-only view of the bytes. They are copied, because torch warns about
        # read-only arrays.
        return np.require(self._adjusted(values), requirements="W")

    def _adjusted(self, values: np.ndarray) -> np.ndarray:
        if self.adjust == "less one":
            return values - np.float32(1)
        if self.adjust == "log of the negative":
            if not bool((values < 0).all()) or not bool(np.isfinite(values).all()):
                raise self._wrong("holds a value that is not negative")
            return np.log(-values)
        return values

    def _stored(self, begin: int, end: int) -> np.ndarray:
        """Return the blocks that contain the values [begin, end), uint8 [blocks, bytes]."""
        start = self.start + begin // self.type.values * self.type.bytes
        num_bytes = (end - begin) // self.type.values * self.type.bytes
        data = read_range(self.path, start, num_bytes, f"tensor {self.stored_name}")
        return np.frombuffer(data, np.uint8).reshape(-1, self.type.bytes)


def tensor_entries(
    container: Container,
    canonical_name: Callable[[str], str | None],
    paired_heads: Callable[[str], int],
    parts: Mapping[str, str] = PARTS,
) -> dict[str, GGUFEntry]:
    """Return every tensor by its canonical name (checkpoint/names.py).

    `canonical_name` and `paired_heads` are functions that take a transformers name
    (`model.layers.0.self_attn.q_proj.weight`). `parts`: see `plain_name`. Raises ModelError if a tensor's
    rows cannot be divided evenly among its heads.
    """
    entries: dict[str, GGUFEntry] = {}
    for name, tensor in _each_expert(container, parts):
        canonical = None if name == ROPE_FACTORS else canonical_name(name)
        if canonical is None:
            continue
        if canonical in entries:
            other = entries[canonical].stored_name
            raise ModelError(f"{tensor.path}: {tensor.name} and {other} are the same tensor")
        entries[canonical] = tensor_entry(tensor, paired_heads(name))
    if not entries:
        raise ModelError(f"{container.path} holds no tensors, only a vocabulary; choose a file with weights")
    return entries


def _each_expert(container: Container, parts: Mapping[str, str]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield every tensor with its transformers name, and each expert as its own tensor. Raises ModelError."""
    num_matrices = 0
    for tensor in container.tensors.values():
        stack = _STACK.fullmatch(tensor.name)
        if stack is None or len(tensor.shape) != 3:
            yield plain_name(tensor.name, parts), tensor
            continue
        count, size = tensor.shape[0], tensor.num_bytes // tensor.shape[0]
        num_matrices += count
        if count > MAX_EXPERTS or num_matrices > MAX_MATRICES:
            raise ModelError(f"{tensor.path}: tensor {tensor.name} has {count} experts, which are too many")
        layer, part = stack.groups()
        for index in range(count):
            one = replace(tensor, shape=tensor.shape[1:], start=tensor.start + index * size, num_bytes=size)
            yield f"model.layers.{layer}.mlp.experts.{index}.{part}_proj.weight", one


def plain_name(stored: str, parts: Mapping[str, str] = PARTS) -> str:
    """Return the transformers name of the tensor that GGUF calls `stored`. `parts`: GGUF name -> transformers
    name for the tensors of a layer.
    """
    if found := _NAMED_LAYER.fullmatch(stored):
        return f"model.layers.{found[1]}.{_NAMED[found[2]]}"
    if (found := _HEAD_LAYER.fullmatch(stored)) and found[1] in _HEAD:
        return f"mtp.{_HEAD[found[1]]}.weight"
    if found := _LAYER.fullmatch(stored):
        layer, part, kind = found.groups()
        return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else stored
    whole, _, kind = stored.partition(".")
    return f"{_WHOLE[whole]}.{kind}" if whole in _WHOLE else stored


def tensor_entry(tensor: StoredTensor, paired_heads: int = 0) -> GGUFEntry:
    """Return a tensor's entry. Raises ModelError if the rows cannot be divided evenly among the heads."""
    if paired_heads and tensor.shape[0] % (2 * paired_heads):
        raise ModelError(
            f"{tensor.path}: tensor {tensor.name} has {tensor.shape[0]} rows, which cannot be divided by "
            f"{paired_heads} heads"
        )
    return GGUFEntry(
        path=tensor.path,
        stored_name=tensor.name,
        dtype=tensor.type.name,
        shape=tensor.shape,
        start=tensor.start,
        num_bytes=tensor.num_bytes,
        type=tensor.type,
        paired_heads=paired_heads,
    )

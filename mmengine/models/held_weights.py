"""Records in which formats a model's matrices are held in memory, and describes these formats to users."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from mmengine.checkpoint.tensors import Blocks, Coding, TensorEntry
from mmengine.errors import ModelError
from mmengine.models.quantising import Activations
from mmengine.native import library as native
from mmengine.native.blocks import multiplies_blocks, prefers_codes
from mmengine.native.linear import AnyWeight, ChunkedCodes, RowForm, packed_bytes, prefers_int16

_INT16_ROWS = "int8 by int16"  # int8 codes that are multiplied by int16 activations
_NAMES = {"fp8": "FP8", "int8": "int8", _INT16_ROWS: "int8 with int16 activations", "int4": "int4"}
WHOLE_NUMBERS = {"int8", "int4"}  # The formats whose codes are integers.
_OUTSIDE = ", int8 activations (outside parity)"
W = TypeVar("W", bound=AnyWeight)


class HeldWeights:
    """Records what a WeightReader has returned so far: the matrices' formats, and how many bytes they take
    when packed.

    `library`: the CPU's kernels, or None.
    """

    def __init__(self, library: ctypes.CDLL | None, dtype: torch.dtype, activations: Activations) -> None:
        self._library, self._activations = library, activations
        self._dtype_name = str(dtype).removeprefix("torch.")
        self._forms: set[str] = set()
        self._types: set[str] = set()
        self._dequantised: set[str] = set()
        self._num_bytes = 0

    def add(self, weight: W, form: str = "") -> W:
        """Record a matrix and return it. `form`: the format of its codes, or ""."""
        if isinstance(weight, ChunkedCodes) and weight.row_form is RowForm.INT16:
            self._forms.add(_INT16_ROWS)
        elif form:
            self._forms.add(form)
        if self._library is not None:
            self._num_bytes += packed_bytes(self._library, weight)
        return weight

    def add_types(self, entries: Iterable[TensorEntry], *, as_codes: bool) -> None:
        """Record in which formats the file stores these tensors, if they are quantised. `as_codes`: whether
        memory holds the tensors as GGUF blocks (True) or dequantised (False).
        """
        for entry in entries:
            # A dequantised GGUF tensor with a `coding` is recorded only if an earlier tensor is held in GGUF
            # blocks. Otherwise `text` can name the tensor's coding.
            if entry.blocks is not None and (as_codes or self._types or entry.coding is None):
                (self._types if as_codes else self._dequantised).add(entry.blocks.name)
            elif entry.form_name:
                self._dequantised.add(entry.form_name)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        self._num_bytes += tensor.nbytes

    def remove_tensor(self, tensor: torch.Tensor) -> None:
        self._num_bytes -= tensor.nbytes

    def text(self, entries: Iterable[TensorEntry]) -> str:
        """Return a text that says how quantised matrices are held, or "" if none of `entries` is
        quantised.
        """
        parts = [self._codes(entries)]
        if self._dequantised and (self._types or self._forms):
            parts.append(f"{', '.join(sorted(self._dequantised))} dequantised to {self._dtype_name}")
        return "; ".join(filter(None, parts))

    def _codes(self, entries: Iterable[TensorEntry]) -> str:
        names = ", ".join(_NAMES[form] for form in sorted(self._forms))
        if self._types:
            held = "held as codes" + (f" and other matrices as {names}" if names else "")
            return f"{', '.join(sorted(self._types))} {held} in {self._num_bytes / 1e6:,.1f} MB"
        if names:
            return names + (_OUTSIDE if self._activations == "int8" else "")
        stored = {_NAMES[each.coding.form] for each in entries if each.coding is not None}
        stored |= {each.blocks.name for each in entries if each.blocks is not None and each.coding is None}
        stored |= {each.form_name for each in entries if each.form_name}
        return ", ".join(f"{name} held as {self._dtype_name}" for name in sorted(stored))

    def check_activations(self) -> None:
        """Raise ModelError if `activations` is "int8" but no matrix with integer codes was read."""
        if self._activations == "int8" and not self._forms & WHOLE_NUMBERS:
            held = ", ".join(_NAMES[form] for form in sorted(self._forms)) or self._dtype_name
            raise ModelError(
                f"activations int8 needs matrices with integer codes, but this model has none ({held}); add "
                "quantize int8, use an int4 folder or a Q8_0, Q4_0 or Q4_1 GGUF file, or remove activations"
            )


def holds_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether matrices may be held in GGUF's blocks on this device in this dtype."""
    library = native.load() if device.type == "cpu" else None
    return library is not None and multiplies_blocks(library, dtype)


def row_form(activations: Activations, coding: Coding, blocks: Sequence[Blocks | None]) -> RowForm:
    """Return the format to which the kernels convert activations for the product with a matrix in `coding`.

    `blocks`: the stored blocks of the matrix's tensors, or an empty list for a matrix that is quantised at
    loading.
    """
    library = native.load()
    if activations == "int8" and coding.form in WHOLE_NUMBERS:
        return RowForm.INT8
    is_q8_0 = bool(blocks) and all(each is not None and each.name == "Q8_0" for each in blocks)
    return RowForm.INT16 if is_q8_0 and library and prefers_int16(library) else RowForm.FLOAT


def faster_as_codes(blocks: Iterable[Blocks | None]) -> bool:
    """Return whether the kernels are faster with int8 or int4 codes than with these blocks."""
    library = native.load()
    numbers = [each.number for each in blocks if each is not None]
    return library is not None and prefers_codes(library, numbers)

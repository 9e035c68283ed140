"""Recurrent states: what a row has beside its KV, and what a step does to it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Of a model whose layers have some: `num_layers` of them, each with the last `taps` - 1 inputs of a
    convolution over `width` channels, in the model's dtype, and a matrix [key_dim, value_dim] for each of
    `num_heads` heads, float32."""

    num_layers: int
    width: int
    taps: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def input_width(self) -> int:
        """What a token brings to a layer's state: its channels, and two numbers for each head."""
        return self.width + 2 * self.num_heads

    def slot_bytes(self, itemsize: int) -> int:
        """Of one row, with values of the model's dtype in so many bytes."""
        inputs = (self.taps - 1) * self.width * itemsize
        return self.num_layers * (inputs + 4 * self.num_heads * self.key_dim * self.value_dim)

    def input_bytes(self, itemsize: int) -> int:
        """Of a token that may be taken back."""
        return self.num_layers * self.input_width * itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StepStates(Generic[T]):
    """For n rows of a step, s slots. Tensors are torch's, arrays numpy's int32 on the host.

    A row's state in its slot stands behind as many tokens as were sure when it ran last. In `pending` are the
    inputs of those behind them, drafts then: of these the first `stayed` were accepted, and go before the
    row's tokens of this step, of which the first `certain` are sure. `kept_after`: of each row (places
    kept_starts[i] to kept_starts[i + 1]) ascending counts of tokens behind the state in the slot, from 1 to
    stayed + certain, behind which the state is written to `kept_slots`, too."""

    conv: T  # [s, layers, taps - 1, width], the oldest input first; the model's dtype
    # float32 [s, layers, heads, key_dim, value_dim]; within a head the CPU's kernels have their own order
    recurrent: T
    # [max rows, layers, room, input_width]: inputs as they enter the convolution, then the numbers
    pending: T
    slots: np.ndarray  # [n]
    rows: np.ndarray  # [n]
    query_starts: np.ndarray  # [n + 1]
    stayed: np.ndarray  # [n]
    certain: np.ndarray  # [n]
    kept_starts: np.ndarray  # [n + 1]
    kept_after: np.ndarray  # [k]
    kept_slots: np.ndarray  # [k]

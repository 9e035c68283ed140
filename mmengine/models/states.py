"""Recurrent states, which a row has beside its KV, and their changes in a step."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes of recurrent states in a model with such layers.

    Each of `num_layers` layers has the last `taps` - 1 inputs of a convolution over `width` channels, in the
    model's dtype, and a float32 matrix [key_dim, value_dim] for each of `num_heads` heads.
    """

    num_layers: int
    width: int
    taps: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def input_width(self) -> int:
        """Return how wide a token's input is to a layer's state: its channels, and two numbers per head."""
        return self.width + 2 * self.num_heads

    def slot_bytes(self, itemsize: int) -> int:
        """Return how many bytes a row's states take; `itemsize` is a value's size in the model's dtype."""
        inputs = (self.taps - 1) * self.width * itemsize
        return self.num_layers * (inputs + 4 * self.num_heads * self.key_dim * self.value_dim)

    def input_bytes(self, itemsize: int) -> int:
        """Return how many bytes a token's inputs take, which are kept while the token may be taken back."""
        return self.num_layers * self.input_width * itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StepStates(Generic[T]):
    """The states for n rows of a step, in s slots. Tensors are torch tensors; arrays are numpy int32 on the
    host.

    A row's state in its slot covers all tokens that were certain in the row's last step. `pending` holds the
    inputs for the tokens after these, which were drafts. The first `stayed` drafts were accepted and come
    before the row's tokens in this step, of which the first `certain` are certain.

    `kept_after` holds, for each row i at places kept_starts[i] to kept_starts[i + 1], ascending token counts
    from 1 to stayed + certain, counted from the slot's state. After each such count the state is also written
    to the slot in `kept_slots`.
    """

    conv: T  # [s, layers, taps - 1, width], oldest input first; the model's dtype.
    # float32 [s, layers, heads, key_dim, value_dim]. Within a head the CPU kernels have their own order.
    recurrent: T
    # [max rows, layers, room, input_width]: inputs as they enter the convolution, then the two numbers per
    # head.
    pending: T
    slots: np.ndarray  # [n]
    rows: np.ndarray  # [n]
    query_starts: np.ndarray  # [n + 1]
    stayed: np.ndarray  # [n]
    certain: np.ndarray  # [n]
    kept_starts: np.ndarray  # [n + 1]
    kept_after: np.ndarray  # [k]
    kept_slots: np.ndarray  # [k]

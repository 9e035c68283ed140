"""The recurrent states that a row has in addition to its KV, and how a step changes them."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes for recurrent states, in a model with such layers.

    Each of the `num_layers` layers with states stores the last `taps` - 1 inputs for a convolution over
    `width` channels, in the model's dtype, and a float32 matrix [key_dim, value_dim] for each of `num_heads`
    heads.
    """

    num_layers: int
    width: int
    taps: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def input_width(self) -> int:
        """Return how many values per token update a layer's state: the
        convolution's channels, and each head's inputs to beta and to the decay.
        """
        return self.width + 2 * self.num_heads

    def slot_bytes(self, itemsize: int) -> int:
        """Return how many bytes a row's states take; `itemsize` is a value's size in the model's dtype."""
        inputs = (self.taps - 1) * self.width * itemsize
        return self.num_layers * (inputs + 4 * self.num_heads * self.key_dim * self.value_dim)

    def input_bytes(self, itemsize: int) -> int:
        """Return the size in bytes that a token's inputs take in all layers. They are kept while the token is
        a draft that may still be rejected.
        """
        return self.num_layers * self.input_width * itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StepStates(Generic[T]):
    """The states for a step's n rows, in s slots. Tensors are torch tensors; arrays are numpy int32 on the
    host.

    A row's state in its slot includes all tokens that were certain in the row's last step. `pending` holds
    the inputs for the tokens after these, which were drafts. The first `stayed` drafts were accepted;
    the step computes them again, before the row's new tokens. Of the new tokens, the first `certain` are
    certain, and the others are drafts.

    A step can also keep copies of a row's state. For row i, entries kept_starts[i] to kept_starts[i + 1] in
    `kept_after` are ascending token counts after the slot's state, from 1 to stayed + certain. The state
    after so many tokens is also written to the slot in `kept_slots`.
    """

    conv: T  # [s, layers, taps - 1, width], oldest input first; the model's dtype.
    # float32 [s, layers, heads, key_dim, value_dim]. The CPU kernels store a head's values in another order.
    recurrent: T
    # [max rows, layers, room, input_width]: inputs of the convolution, then the inputs of beta and the decay.
    pending: T
    slots: np.ndarray  # [n], indices in `conv` and `recurrent`
    rows: np.ndarray  # [n], indices in `pending`
    query_starts: np.ndarray  # [n + 1], where each row's tokens begin in the batch, then their number
    stayed: np.ndarray  # [n]
    certain: np.ndarray  # [n]
    kept_starts: np.ndarray  # [n + 1]
    kept_after: np.ndarray  # [k]
    kept_slots: np.ndarray  # [k]

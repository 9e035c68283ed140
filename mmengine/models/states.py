"""Describes the recurrent states that a row has in addition to its KV, and how a step changes these
states.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The sizes of recurrent states, for a model that has layers with such states.

    Each of these `num_layers` layers stores the last `taps` - 1 inputs for a convolution over `width`
    channels, in the model's dtype. It also stores a float32 matrix [key_dim, value_dim] for each of
    `num_heads` heads.
    """

    num_layers: int
    width: int
    taps: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def input_width(self) -> int:
        """Return how many values per token update a layer's state. These are the convolution's channels, and
        each head's inputs to beta and to the decay (delta.py).
        """
        return self.width + 2 * self.num_heads

    def slot_bytes(self, itemsize: int) -> int:
        """Return how many bytes a row's states take. `itemsize`: a value's size in the model's dtype."""
        inputs = (self.taps - 1) * self.width * itemsize
        return self.num_layers * (inputs + 4 * self.num_heads * self.key_dim * self.value_dim)

    def input_bytes(self, itemsize: int) -> int:
        """Return how many bytes a token's inputs take in all layers. These inputs are kept while the token is
        a draft that may still be rejected.
        """
        return self.num_layers * self.input_width * itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StepStates(Generic[T]):
    """The states for a step with n rows, in s slots. Tensors are torch tensors. Arrays are numpy int32 on the
    host.

    A token is certain if it is not a draft. The state in a row's slot covers all tokens up to the last
    certain token in the row's previous step. `pending` has the inputs of that step's drafts. The first
    `stayed` drafts were accepted, and this step first adds these drafts to the state. The row's new tokens
    follow: first `certain` certain tokens, then drafts.

    A step can also copy states to other slots. The copies for row i are kept_starts[i] to kept_starts[i + 1].
    Copy k is the row's state after kept_after[k] tokens, and is written to slot kept_slots[k]. These tokens
    are the accepted drafts and then the certain tokens, so kept_after is 1 to stayed + certain, ascending.
    """

    conv: T  # [s, layers, taps - 1, width], oldest input first; the model's dtype.
    # float32 [s, layers, heads, key_dim, value_dim]. The CPU kernels store a head's values in another order.
    recurrent: T
    # [max rows, layers, max drafts, input_width]: the convolution's inputs, then the inputs to beta and to
    # the decay.
    pending: T
    slots: np.ndarray  # [n], indices in `conv` and `recurrent`
    rows: np.ndarray  # [n], indices in `pending`
    query_starts: np.ndarray  # [n + 1], where each row's tokens begin in the batch, then the token count
    stayed: np.ndarray  # [n]
    certain: np.ndarray  # [n]
    kept_starts: np.ndarray  # [n + 1]
    kept_after: np.ndarray  # [k]
    kept_slots: np.ndarray  # [k]

"""Containers for the weights of a layer's feed-forward network.

The matrix type is a parameter: torch layers and packed kernel layers share these classes.
"""

from typing import Generic, NamedTuple, TypeVar

L = TypeVar("L")
E = TypeVar("E")


class Dense(NamedTuple, Generic[L]):
    """A SwiGLU whose matrices have type L. The kernels need a `gate_up` that PackedLinear (linear.py) packed
    with `gate_up=True`.
    """

    gate_up: L  # hidden to 2 * intermediate: gate's rows, then up's
    down: L  # intermediate to hidden


class Mixture(NamedTuple, Generic[L, E]):
    """A mixture-of-experts layer. A value of type E stacks one matrix per expert."""

    router: L  # hidden to the number of experts
    gate_up: E
    down: E
    shared: Dense[L] | None  # an expert that every token passes through
    shared_gate: L | None  # hidden to 1
    top_k: int  # experts per token
    norm_top_k: bool  # whether the chosen experts' probabilities are divided by their sum

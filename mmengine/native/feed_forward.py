"""The weights of a layer's feed-forward, for whoever multiplies with them."""

from typing import Generic, NamedTuple, TypeVar

L = TypeVar("L")
E = TypeVar("E")


class Dense(NamedTuple, Generic[L]):
    """A SwiGLU, whatever L it is that multiplies with a matrix; for the kernels it is packed, `gate_up` as
    such."""

    gate_up: L  # hidden to 2 * intermediate, gate's and then up's
    down: L  # intermediate to hidden


class Mixture(NamedTuple, Generic[L, E]):
    """Experts, whatever E is the same matrix of all of them."""

    router: L  # hidden to the number of experts
    gate_up: E
    down: E
    shared: Dense[L] | None  # one for every token
    shared_gate: L | None  # hidden to 1
    top_k: int  # that a token takes
    norm_top_k: bool  # whether their chances are divided by their sum

"""Measures two schedulers alternately, so that other load on the machine slows both equally."""

from collections.abc import Iterator, Sequence
from typing import Protocol


class Side(Protocol):
    """A scheduler with its requests."""

    def step(self) -> int:
        """Run one step and return the scheduler's CPU time in ns."""


def turns(sides: Sequence[Side], steps: int, size: int) -> Iterator[tuple[float, float]]:
    """Yield the mean CPU time per step of both schedulers, in µs, for every `size` steps.

    The schedulers run one after the other, in alternating order.
    """
    for turn in range(steps // size):
        spent = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            spent[which] = sum(sides[which].step() for _ in range(size)) / size / 1e3
        yield spent[0], spent[1]

"""A model cut over several ranks: what a rank holds, and how the ranks add their parts up.

A linear layer is cut by its outputs (columns of x W^T: each rank has some heads, or some of the MLP's
middle) and the one behind it by its inputs (rows), so a layer needs two sums over the ranks and nothing
else. Who is cut how is data, a plan of the model's plugin.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmengine.errors import ConfigError

COLUMNS, ROWS = 0, 1  # the dimension of a weight [out, in] that is cut


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. `all_reduce` takes this rank's tensor and gives the sum over all ranks, the
    same bits on each, perhaps in its place. Rank 0 alone has what is not cut and used once a step: vision
    tower and head."""

    rank: int
    size: int
    all_reduce: Callable[[Any], Any]

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part_of(self, count: int, what: str) -> int:
        """What a rank has of `count`. Raises ConfigError where that is no whole number."""
        part, rest = divmod(count, self.size)
        if rest:
            fitting = ", ".join(str(size) for size in range(1, self.size) if count % size == 0)
            raise ConfigError(
                f"tensor_parallel {self.size} cannot cut {count} {what}: {count} = {self.size} x {part} + "
                f"{rest}; choose {fitting}, or another divisor of {count}"
            )
        return part

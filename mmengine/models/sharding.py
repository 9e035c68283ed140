"""Splits a model over several ranks: each rank's part, and how the ranks add their results.

A linear layer is cut by its outputs (columns of x W^T: each rank has some heads, or a part of the MLP's
intermediate values), and the next linear layer by its inputs (rows). So a layer needs only two sums over the
ranks. A plan in the model's plugin tells how each weight is cut, as data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmengine.errors import ConfigError

COLUMNS, ROWS = 0, 1  # The dimension that is cut in a weight [out, in].


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` among `size` ranks.

    `all_reduce` takes this rank's tensor and returns the sum over all ranks, perhaps in place; each rank gets
    the same bits. Only rank 0 has the uncut parts that are used once per step: vision tower and head.
    """

    rank: int
    size: int
    all_reduce: Callable[[Any], Any]

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part_of(self, count: int, what: str) -> int:
        """Return a rank's share when `count` is divided. Raises ConfigError if the share is not a whole
        number.
        """
        part, rest = divmod(count, self.size)
        if rest:
            fitting = ", ".join(str(size) for size in range(1, self.size) if count % size == 0)
            raise ConfigError(
                f"tensor_parallel {self.size} cannot cut {count} {what}: {count} = {self.size} x {part} + "
                f"{rest}; choose {fitting}, or another divisor of {count}"
            )
        return part

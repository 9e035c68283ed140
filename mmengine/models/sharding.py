"""Describes tensor parallelism: each rank's shard of the model, and the sum over the ranks.

The first linear layer in attention or in an MLP is column-parallel: each rank has some heads, or some
intermediate values. The second linear layer is row-parallel. A decoder layer therefore needs only two
all-reduces. mmengine/models/decoder/sharding.py lists how each weight is cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmengine.errors import ConfigError

COLUMNS, ROWS = 0, 1  # The dimension along which a weight [out, in] is cut.


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` among `size` ranks.

    `all_reduce`: takes this rank's tensor and returns the sum over all ranks, possibly in the same tensor.
    All ranks get the same bits. Only rank 0 has the vision tower and the LM head, which are not sharded.
    """

    rank: int
    size: int
    all_reduce: Callable[[Any], Any]

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part_of(self, count: int, what: str) -> int:
        """Return `count` divided by the number of ranks. Raises ConfigError if the result is not an integer.
        `what`: the name for the counted items in the error.
        """
        part, rest = divmod(count, self.size)
        if rest:
            fitting = ", ".join(str(size) for size in range(1, self.size) if count % size == 0)
            raise ConfigError(
                f"tensor_parallel {self.size} cannot cut {count} {what}: {count} = {self.size} x {part} + "
                f"{rest}; choose {fitting}, or another divisor of {count}"
            )
        return part

"""Used in rank 0: starts a sharded model's other ranks, and connects all ranks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmengine.core.engine import EngineCore
from mmengine.events.tee import Tee
from mmengine.models.plugin import VisionLanguageModel
from mmengine.models.sharding import Shard
from mmengine.runtime.device.dtypes import name_of
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.parallel.followers import Followers
from mmengine.runtime.parallel.group import StepGroup
from mmengine.runtime.parallel.job import Job
from mmengine.runtime.parallel.leader import LeadingExecutor

LOAD_TIMEOUT_S = 1800.0
# Timeout for exchanges between ranks if step_timeout_s is 0. Also the minimum timeout for messages, because
# snapshots may be large.
EXCHANGE_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Ranks:
    """An engine's ranks, as seen from rank 0."""

    group: StepGroup
    followers: Followers
    placement: Placement  # the placement of rank 0
    timeout_s: float
    _executor: LeadingExecutor | None = None

    @classmethod
    def begin(
        cls,
        size: int,
        folder: Path,
        *,
        placement: Placement,
        step_timeout_s: int,
        num_threads: int,
    ) -> "Ranks":
        """Start the other ranks, so that all ranks read their weights at the same time. Raises ConfigError if
        there are too few devices, or if a process cannot be started.
        """
        devices = [placement.device.of_rank(rank, size) for rank in range(size)]
        dtype, attention = name_of(placement.dtype), placement.attention
        timeout_s = float(step_timeout_s or EXCHANGE_TIMEOUT_S)
        followers = Followers(size, max(timeout_s, EXCHANGE_TIMEOUT_S))
        store = str(followers.store)
        followers.assign(
            [
                Job(rank, size, str(folder), device.name, dtype, attention, store, timeout_s, num_threads)
                for rank, device in enumerate(devices[1:], 1)
            ]
        )
        return cls(StepGroup(0, size), followers, replace(placement, device=devices[0]), timeout_s)

    @property
    def shard(self) -> Shard:
        return self.group.shard()

    def meet(self) -> None:
        """Wait until all ranks have loaded their weights, and connect the ranks. Rank 0 must have loaded its
        weights before this call. Raises ConfigError if a rank fails, or GroupLost if the ranks cannot
        connect.
        """
        self.followers.await_ready(LOAD_TIMEOUT_S)
        self.group.join(self.followers.store, self.placement.device, self.timeout_s)

    def executor(self, model: VisionLanguageModel, *args: Any) -> LeadingExecutor:
        """Return an executor for this rank's part of the model. `args`: as for TorchExecutor."""
        leading = LeadingExecutor(model, *args, group=self.group, followers=self.followers)
        self._executor = leading
        return leading

    def start(self, core: EngineCore) -> None:
        """Send the state of `core` to the other ranks before the first step, and then capture steps. The
        other ranks allocate their memory before the capture. Raises ConfigError if a rank fails.
        """
        assert self._executor is not None  # the engine was built with the result of `executor`
        self._executor.frames = core.sink = Tee(core.sink)
        self.followers.start(core.snapshot(0))
        self.followers.await_ready(LOAD_TIMEOUT_S)
        self._executor.capture(LOAD_TIMEOUT_S)

    def close(self) -> None:
        self.followers.close()
        self.group.close()

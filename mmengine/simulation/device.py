"""The base class for simulated executors. A cost model determines how long each step takes on a simulated
clock.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mmengine.core.executor import StepPlan, StepResult
from mmengine.request import Request
from mmengine.simulation.sampled_rows import pooled_vectors


class Observer(Protocol):
    """Receives each step's plan on dispatch, and the result on collection."""

    def dispatched(self, plan: StepPlan) -> None: ...

    def collected(self, plan: StepPlan, result: StepResult, clock_ns: int) -> None: ...


class Cost(Protocol):
    def price(self, plan: StepPlan, num_embeds: int) -> int:
        """Return the device time in ns of a step that computes `num_embeds` embeddings."""


def embeds_of(plan: StepPlan) -> int:
    """Return how many embeddings a step computes. If the step encodes only a part of a media item, the result
    includes the part's share of the item's embeddings.
    """
    num_embeds, part = sum(item.request.media[item.index].num_embeds for item in plan.encode), plan.part
    if part is None:
        return num_embeds
    whole = part.item.request.media[part.item.index].num_embeds
    return num_embeds + share_of(whole, part.start, part.until, part.work)


def share_of(num_embeds: int, start: int, until: int, work: int) -> int:
    """Return the number of embeddings that `embeds_of` adds for a part of a media item.

    An item is in `plan.encode` only in the step with its last part. For an earlier part, the result is the
    part's share of the embeddings. For the last part, `plan.encode` already counts the whole item. The result
    is then 0 or negative, and removes the earlier parts' shares.
    """
    share = num_embeds * until // work - num_embeds * start // work
    return share - num_embeds if until >= work else share


class TimedExecutor:
    """An executor whose steps take the time that `cost` returns.

    `host_ns`: maps the number of rows to the host's time for the step in ns. `clock_ns`: the simulated
    time in ns.
    """

    needs_plan = True

    def __init__(
        self, cost: Cost, observers: tuple[Observer, ...], host_ns: Callable[[int], int] = lambda num_rows: 0
    ):
        self._cost, self._observers, self._host_ns = cost, observers, host_ns
        self._plans: deque[tuple[StepPlan, int, int]] = deque()  # (plan, device time in ns, end time in ns)
        # `_free_at_ns`: when the device becomes idle. `_since_ns`: the start of the period for which the next
        # result reports host time.
        self._free_at_ns = self._since_ns = 0
        self.clock_ns = 0

    def dispatch(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            self._set_row(admission.row, admission.request)
        if not self._plans:
            self._since_ns = self.clock_ns
        self.clock_ns += self._host_ns(len(plan.rows))
        device_ns = self._cost.price(plan, embeds_of(plan))
        self._free_at_ns = max(self.clock_ns, self._free_at_ns) + device_ns
        self._plans.append((plan, device_ns, self._free_at_ns))
        for observer in self._observers:
            observer.dispatched(plan)

    def collect(self) -> StepResult:
        plan, device_ns, end_ns = self._plans.popleft()
        self.clock_ns = max(self.clock_ns, end_ns)
        result = self._run(plan, device_ns)
        if plan.pool:
            result.pooled = pooled_vectors(plan, plan.input_ids.astype(np.uint64))
        result.host_ns = max(0, self.clock_ns - self._since_ns - device_ns)
        self._since_ns = self.clock_ns
        for observer in self._observers:
            observer.collected(plan, result, self.clock_ns)
        return result

    def discard(self) -> None:
        self._plans.clear()

    def close(self) -> None:
        self._plans.clear()

    def wait_until(self, time_ns: int) -> None:
        """Advance the clock to `time_ns` while no step runs."""
        self.clock_ns = max(self.clock_ns, time_ns)

    def _set_row(self, row: int, request: Request) -> None:
        """Assign a row to a request."""
        raise NotImplementedError

    def _run(self, plan: StepPlan, device_ns: int) -> StepResult:
        """Return the step's result. Raises ExecutorFailed."""
        raise NotImplementedError

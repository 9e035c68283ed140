"""What the executors of a simulation share: steps wait for a device that computes one at a time, on a clock
of its own."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from mmengine.core.executor import StepPlan, StepResult
from mmengine.request import Request


class Observer(Protocol):
    """Sees what goes to the executor and what comes back."""

    def dispatched(self, plan: StepPlan) -> None: ...

    def collected(self, plan: StepPlan, result: StepResult, clock_ns: int) -> None: ...


class Cost(Protocol):
    def price(self, plan: StepPlan, num_embeds: int) -> int:
        """Ns that the device takes for a step in which so many embeddings are computed."""


def embeds_of(plan: StepPlan) -> int:
    """Embeddings that a step computes; of an item in pieces as many as its part of the work."""
    num_embeds, part = sum(item.request.media[item.index].num_embeds for item in plan.encode), plan.part
    if part is None:
        return num_embeds
    whole = part.item.request.media[part.item.index].num_embeds
    return num_embeds + share_of(whole, part.start, part.until, part.work)


def share_of(num_embeds: int, start: int, until: int, work: int) -> int:
    """Of an item that counts with all its embeddings where its last part is: what a part changes in that."""
    share = num_embeds * until // work - num_embeds * start // work
    return share - num_embeds if until >= work else share


class TimedExecutor:
    """A step takes what `cost` says; `host_ns`: what the engine takes for a step of so many rows before the
    device gets it. `clock_ns` is the time at which the last collected step ended."""

    needs_plan = True

    def __init__(
        self, cost: Cost, observers: tuple[Observer, ...], host_ns: Callable[[int], int] = lambda num_rows: 0
    ):
        self._cost, self._observers, self._host_ns = cost, observers, host_ns
        self._plans: deque[tuple[StepPlan, int, int]] = deque()  # with ns on the device, and when it ends
        self._free_at_ns = self._since_ns = 0  # when the device has nothing to do; when the last result came
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
        """Let time pass in which nothing runs."""
        self.clock_ns = max(self.clock_ns, time_ns)

    def _set_row(self, row: int, request: Request) -> None:
        """A request gets a row."""
        raise NotImplementedError

    def _run(self, plan: StepPlan, device_ns: int) -> StepResult:
        """What the step gives. Raises ExecutorFailed."""
        raise NotImplementedError

"""Let tests control an executor's drafts and step times."""

import numpy as np
from msgspec import structs

from mmengine.runtime.device.clock import LaunchClock
from mmengine.runtime.executor import InFlightStep

STEP_NS = 200_000


class Clock:
    """Replaces the step times that `executor` reports. Every `turn` steps, a draft's cost changes from zero
    to the time for a whole step, or back.
    """

    def __init__(self, executor, turn=25):
        self._dispatch, self._collect, self._turn = executor.dispatch, executor.collect, turn
        self._num_steps, self._drafts = 0, []
        executor.dispatch, executor.collect = self.dispatch, self.collect

    def dispatch(self, plan):
        self._drafts.append(0 if plan.num_drafts is None else int(plan.num_drafts.sum()))
        self._dispatch(plan)

    def collect(self):
        result, drafts = self._collect(), self._drafts.pop(0)
        self._num_steps += 1
        is_dear = self._num_steps // self._turn % 2
        result.draft_ns = 1000 if result.draft_ns else 0
        result.device_ns, result.host_ns = STEP_NS * (1 + is_dear * drafts) + result.draft_ns, 0
        return result


class Granting:
    """Limits each row to `most_of(step)` drafts per step of `executor`. If `most_of` returns None, the plan's
    limit stays.
    """

    def __init__(self, executor, most_of):
        self._dispatch, self._most_of = executor.dispatch, most_of
        executor.dispatch = self.dispatch

    def dispatch(self, plan):
        most = self._most_of(plan.step)
        if most is not None:
            shape = (1, len(plan.rows)) if most else (0, 0)
            plan = structs.replace(plan, draft_room=np.full(shape, most, np.int32))
        self._dispatch(plan)


class LaunchedAhead:
    """Makes `executor` on a CPU behave as on a GPU: `dispatch` starts a step before the previous step's
    result is read.
    """

    def __init__(self, executor):
        self._executor, self._clock = executor, LaunchClock()
        executor.dispatch, executor._finish = self.dispatch, self.finish

    def dispatch(self, plan):
        step = InFlightStep(plan, self._executor._runner.pixels_of(plan))
        self._executor._begin(step)
        self._executor._in_flight.append(step)

    def finish(self, step):
        result = self._executor._runner.finish(step.launched)
        result.device_ns = self._clock.finish()
        return result

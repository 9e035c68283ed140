"""An engine whose steps a host drives: it calls the engine, executes the step, and brings the result."""

from typing import ClassVar

import numpy as np

from mmengine.core.batch import Planner, RowPlanner
from mmengine.core.decide.completion import complete
from mmengine.core.engine import EngineCore
from mmengine.core.outputs import Outputs
from mmengine.core.step_result import drafted_event


class HostDrivenCore(EngineCore):
    """An EngineCore with a step in two halves, for a host such as vLLM whose loop calls its scheduler.

    The host calls `begin_step` and `finish_step` instead of `step`. The executor's `collect` must return at
    once, because the host has the result when it calls `finish_step`. The log says that a host drove the
    engine, so that a replay collects steps where the host did.
    """

    is_host_driven: ClassVar[bool] = True

    @property
    def num_in_flight(self) -> int:
        """The number of dispatched steps that are not collected."""
        return len(self._dispatched)

    def begin_step(self) -> Outputs:
        """Process arrivals, decide the next step, write the events to the log, and dispatch the step.

        This is the first half of a step, for a host that calls an engine instead of being called by it. The
        call never waits for a step in flight: it dispatches nothing while max_in_flight steps run, or if no
        request can run now. Returns the outputs of requests that ended. While the log cannot be written, no
        step starts, and the next call tries again.
        """
        if not self._is_decided and len(self._dispatched) < 1 + self._overlaps:
            self._process_arrivals()
            self._decide()
        return self._commit_and_dispatch()

    def finish_step(self) -> Outputs:
        """Collect the oldest dispatched step, end complete requests, and write the events to the log.

        This is the second half of a step; see `begin_step`. Returns the step's outputs, or no outputs while
        the log cannot be written; the next call of either half then returns them.
        """
        if self._scheduler.ends_leavers_first:
            self._end_leavers()
        self._collect()
        for end in complete(self.view):
            self._emit(end)
        self._is_committed = self.sink.commit()
        return self._collector.take() if self._is_committed else Outputs()

    def propose(self, rows: np.ndarray, num_drafts: np.ndarray, drafts: np.ndarray) -> None:
        """Record drafts that arrived after the last step's result. Call this method between `finish_step` and
        `begin_step`.

        `rows`: running rows, int32 [n]. `num_drafts`: int32 [n]. `drafts`: int32 [num_drafts.sum()]. Raises
        ExecutorFailed for drafts that do not fit the state.
        """
        self._emit(drafted_event(self.state, rows, num_drafts, drafts))


class RowDrivenCore(HostDrivenCore):
    """A HostDrivenCore whose plans describe rows and no single tokens (RowPlanner)."""

    planner_class: ClassVar[type[Planner]] = RowPlanner

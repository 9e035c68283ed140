"""An engine core without a loop, for a host such as vLLM that calls a scheduler and executes the steps."""

from typing import ClassVar

import numpy as np

from mmengine.core.batch import Planner, RowPlanner
from mmengine.core.decide.completion import complete
from mmengine.core.engine import EngineCore
from mmengine.core.outputs import Outputs
from mmengine.core.step_result import drafted_event


class HostDrivenCore(EngineCore):
    """An EngineCore with `begin_step` and `finish_step` instead of `step`. The host executes the step in
    between.

    The host already has the result when it calls `finish_step`, so the executor's `collect` must not wait. A
    replay collects each step at the log's position where the host called `finish_step`.
    """

    is_host_driven: ClassVar[bool] = True

    @property
    def num_in_flight(self) -> int:
        """The number of dispatched steps whose results were not collected yet."""
        return len(self._dispatched)

    def begin_step(self) -> Outputs:
        """Process arrivals, decide the next step, write the events to the log, and dispatch the step.

        Never waits for a step in flight. Nothing is dispatched while max_in_flight steps run, or if no
        request can run now. Returns the outputs of requests that ended. While the log cannot be written, no
        step starts, and the next call tries again to write the log.
        """
        if not self._is_decided and len(self._dispatched) < 1 + self._overlaps:
            self._process_arrivals()
            self._decide()
        return self._commit_and_dispatch()

    def finish_step(self) -> Outputs:
        """Collect the oldest dispatched step, end complete requests, and write the events to the log.

        Returns the step's outputs. While the log cannot be written, the outputs are empty, and the next call
        of `begin_step` or `finish_step` returns the missing outputs.
        """
        if self._scheduler.ends_leavers_first:
            self._end_leavers()
        self._collect()
        for end in complete(self.view):
            self._emit(end)
        self._is_committed = self.sink.commit()
        return self._collector.take() if self._is_committed else Outputs()

    def propose(self, rows: np.ndarray, num_drafts: np.ndarray, drafts: np.ndarray) -> None:
        """Record drafts that the host made after the last step's result. Call this method between
        `finish_step` and `begin_step`.

        `rows`: running rows, int32 [n]. `num_drafts`: each row's draft count, int32 [n]. `drafts`: the rows'
        drafts, row by row, int32 [num_drafts.sum()]. Raises ExecutorFailed for drafts that do not fit the
        state.
        """
        self._emit(drafted_event(self.state, rows, num_drafts, drafts))


class RowDrivenCore(HostDrivenCore):
    """A HostDrivenCore whose plans describe rows but not individual tokens (see RowPlanner)."""

    planner_class: ClassVar[type[Planner]] = RowPlanner

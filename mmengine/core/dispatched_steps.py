"""The steps that the executor has: dispatched, awaited, or lost."""

from collections import deque

import numpy as np

from mmengine.core.executor import Executor, StepPlan, StepResult
from mmengine.core.state.state import State
from mmengine.core.step_result import executed_event, writable
from mmengine.errors import ExecutorFailed, ExecutorLost
from mmengine.events import vocabulary as ev


class DispatchedSteps:
    """One engine's dispatched steps. `num_steps`: how many the executor has already."""

    def __init__(self, executor: Executor, num_steps: int):
        self._executor = executor
        # One entry for each step, the oldest first: the error of a step that will not return, or None.
        self._steps: deque[Exception | None] = deque([None] * num_steps)
        # has an entry while a thread waits for the executor; the thread that removes the entry continues
        self._awaited: list[None] = []

    def __len__(self) -> int:
        return len(self._steps)

    def dispatch(self, plan: StepPlan) -> None:
        """Dispatch a step. The executor's error is raised when the step is collected."""
        self._steps.append(None)
        try:
            self._executor.dispatch(plan)
        except Exception as error:
            self._steps[-1] = error
        except BaseException:
            self._steps[-1] = ExecutorFailed("the step was interrupted")
            raise

    def collect(self, state: State, sampled: np.ndarray) -> ev.Executed | ev.Failed:
        """Return the oldest step's result, whose rows `sampled` (intp) give tokens. Steps after a failed
        step are forgotten. Raises ExecutorLost at each call once no step can run any more.
        """
        try:
            if self._steps[0] is not None:
                raise self._steps[0]
            event = executed_event(self._await(), state, sampled)
        except ExecutorLost as error:  # no request is at fault: they stay as they are, for another process
            self._steps[0] = error
            raise
        except Exception as error:  # whatever the device raises: the step is lost, the engine is not
            self._executor.discard()
            self._steps.clear()
            text = str(error) if isinstance(error, ExecutorFailed) else f"{type(error).__name__}: {error}"
            return ev.Failed(writable(text))
        except BaseException:
            self._steps[0] = ExecutorFailed("the step was interrupted")
            raise
        self._steps.popleft()
        return event

    def _await(self) -> StepResult:
        self._awaited.append(None)
        try:
            return self._executor.collect()
        finally:
            try:
                self._awaited.pop()
            except IndexError:
                raise SystemExit("the step counted as hung") from None

    def stop_waiting(self) -> bool:
        """End the thread that waits for the executor, should the executor ever return. Called by another
        thread. Returns False if no thread waits.
        """
        try:
            self._awaited.pop()  # atomic: only one of the two threads gets the entry
        except IndexError:
            return False
        return True

    def forget(self) -> None:
        """Forget all steps: none of them returns."""
        self._steps.clear()

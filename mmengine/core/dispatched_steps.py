"""Tracks the steps that were dispatched to the executor and whose results were not collected yet."""

from collections import deque

import numpy as np

from mmengine.core.executor import Executor, PooledVector, StepPlan, StepResult
from mmengine.core.state.state import State
from mmengine.core.step_result import executed_event, writable
from mmengine.errors import ExecutorFailed, ExecutorLost
from mmengine.events import vocabulary as ev


class DispatchedSteps:
    """An engine's dispatched steps, oldest first. `num_steps`: how many steps were dispatched before this
    object was created.
    """

    def __init__(self, executor: Executor, num_steps: int):
        self._executor = executor
        # One entry for each step, oldest first: None, or the error that `collect` raises because the dispatch
        # failed.
        self._steps: deque[Exception | None] = deque([None] * num_steps)
        # Contains an entry while a thread waits for the executor. Only the thread that removes the entry may
        # continue.
        self._awaited: list[None] = []
        self.pooled: tuple[PooledVector, ...] = ()  # the vectors of the last collected step

    def __len__(self) -> int:
        return len(self._steps)

    def dispatch(self, plan: StepPlan) -> None:
        """Dispatch a step. An error from the executor is raised later, when the step is collected."""
        self._steps.append(None)
        try:
            self._executor.dispatch(plan)
        except Exception as error:
            self._steps[-1] = error
        except BaseException:
            self._steps[-1] = ExecutorFailed("the step was interrupted")
            raise

    def collect(self, state: State, sampled: np.ndarray) -> ev.Executed | ev.Failed:
        """Return EXECUTED with the oldest step's result, or FAILED after an error. After a failed step all
        later steps are discarded too. `sampled`: the rows that get tokens, intp. Raises ExecutorLost, at each
        call, if the executor cannot run any more steps.
        """
        try:
            if self._steps[0] is not None:
                raise self._steps[0]
            result = self._await()
            event = executed_event(result, state, sampled)
            self.pooled = result.pooled
        # No request caused this error. All requests stay as they are, so that another process can resume
        # them.
        except ExecutorLost as error:
            self._steps[0] = error
            raise
        except Exception as error:  # any exception from the device loses the step, but not the engine
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
        """Make the thread that waits for the executor exit as soon as the executor returns. Another thread
        calls this method. Returns False if no thread waits.
        """
        try:
            self._awaited.pop()  # atomic, so only one of the two threads removes the entry
        except IndexError:
            return False
        return True

    def forget(self) -> None:
        """Forget all steps: none of them will return a result."""
        self._steps.clear()

"""Tracks the steps in flight: dispatched to the executor, but not collected yet."""

from collections import deque

import numpy as np

from mmengine.core.executor import Executor, PooledVector, StepPlan, StepResult
from mmengine.core.state.state import State
from mmengine.core.step_result import executed_event, writable
from mmengine.errors import ExecutorFailed, ExecutorLost
from mmengine.events import vocabulary as ev


class DispatchedSteps:
    """One engine's steps in flight, oldest first.

    `num_steps`: number of steps that are already in flight, if a replay begins at a snapshot.
    """

    def __init__(self, executor: Executor, num_steps: int):
        self._executor = executor
        # For each step, None or the error of its failed dispatch, which `collect` reports.
        self._steps: deque[Exception | None] = deque([None] * num_steps)
        # Contains one entry while a thread waits for the executor. If `stop_waiting` removes the entry before
        # the executor returns, the thread ends.
        self._awaited: list[None] = []
        self.pooled: tuple[PooledVector, ...] = ()  # the vectors of the last collected step

    def __len__(self) -> int:
        return len(self._steps)

    def dispatch(self, plan: StepPlan) -> None:
        """Dispatch a step. If the executor raises an error, `collect` reports the error for this step."""
        self._steps.append(None)
        try:
            self._executor.dispatch(plan)
        except Exception as error:
            self._steps[-1] = error
        except BaseException:
            self._steps[-1] = ExecutorFailed("the step was interrupted")
            raise

    def collect(self, state: State, sampled: np.ndarray) -> ev.Executed | ev.Failed:
        """Wait for the oldest step and return EXECUTED with its result, or FAILED if it failed.

        If a step fails, all later steps are discarded too. `sampled`: the rows that get tokens, intp. Raises
        ExecutorLost if the executor cannot run any more steps; all later calls raise the same error.
        """
        try:
            if self._steps[0] is not None:
                raise self._steps[0]
            result = self._await()
            event = executed_event(result, state, sampled)
            self.pooled = result.pooled
        # No request caused this error. All requests stay unchanged, so that another process can resume them.
        except ExecutorLost as error:
            self._steps[0] = error
            raise
        except Exception as error:  # an exception from the device fails the step, but the engine continues
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
        """Make the waiting thread exit as soon as the executor returns, because the step counts as hung.

        Any thread may call this method. Returns False if no thread waits for the executor.
        """
        try:
            self._awaited.pop()  # atomic, so either this thread or the waiting thread removes the entry
        except IndexError:
            return False
        return True

    def forget(self) -> None:
        """Forget all steps in flight, which will not return results."""
        self._steps.clear()

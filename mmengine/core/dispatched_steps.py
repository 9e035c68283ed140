"""The steps that are with the executor: handed over, awaited, or lost."""

from collections import deque

import numpy as np

from mmengine.core.executor import Executor, StepPlan, StepResult
from mmengine.core.state.state import State
from mmengine.core.step_result import executed_event, writable
from mmengine.errors import ExecutorFailed, ExecutorLost
from mmengine.events import vocabulary as ev


class DispatchedSteps:
    """`num_steps`: how many are with the executor already."""

    def __init__(self, executor: Executor, num_steps: int):
        self._executor = executor
        # The oldest first: why one will not come back, if that is known already.
        self._steps: deque[Exception | None] = deque([None] * num_steps)
        self._awaited: list[None] = []  # one while the executor is awaited; who takes it out goes on

    def __len__(self) -> int:
        return len(self._steps)

    def dispatch(self, plan: StepPlan) -> None:
        """Hand a step over. What the executor has against it is said where the step is collected."""
        self._steps.append(None)
        try:
            self._executor.dispatch(plan)
        except Exception as error:
            self._steps[-1] = error
        except BaseException:
            self._steps[-1] = ExecutorFailed("the step was interrupted")
            raise

    def collect(self, state: State, sampled: np.ndarray) -> ev.Executed | ev.Failed:
        """What became of the oldest step, of which the rows `sampled` (intp) give tokens; those behind one
        that failed are forgotten. Raises ExecutorLost, again and again, when no step can run any more."""
        try:
            if self._steps[0] is not None:
                raise self._steps[0]
            event = executed_event(self._await(), state, sampled)
        except ExecutorLost as error:  # nobody's fault: requests stay as they are, for another process
            self._steps[0] = error
            raise
        except Exception as error:  # whatever the device says: the step is lost, the engine is not
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
        """From another thread: the thread that awaits the executor ends, should that ever come back. False
        where nobody awaits it."""
        try:
            self._awaited.pop()  # one call of C: this and the waiting thread cannot both have it
        except IndexError:
            return False
        return True

    def forget(self) -> None:
        """None of them comes back."""
        self._steps.clear()

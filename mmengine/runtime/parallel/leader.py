"""Rank 0's executor. It sends each step to the other ranks, computes its own part, and samples the
tokens.
"""

import time
from functools import partial
from typing import Any

import msgspec
import torch

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan, StepResult
from mmengine.errors import ExecutorLost
from mmengine.events.tee import Tee
from mmengine.models.plugin import ModelSpec, VisionLanguageModel
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.port import Event
from mmengine.runtime.executor import InFlightStep, TorchExecutor
from mmengine.runtime.graphs.capture import recorder_for
from mmengine.runtime.parallel.followers import Followers
from mmengine.runtime.parallel.graphs import capture_steps
from mmengine.runtime.parallel.group import GroupLost, StepGroup
from mmengine.runtime.result_reader import ComputedStep
from mmengine.runtime.rows import PositionsOf

# While waiting for a step: seconds between device polls, and between checks that all ranks are alive.
POLL_S, LOOK_S = 5e-5, 0.2


class LeadingModel:
    """Rank 0's part of the model. `embed` sends token ids that the other ranks lack."""

    def __init__(self, model: VisionLanguageModel, group: StepGroup) -> None:
        self._model, self._group = model, group
        self.spec: ModelSpec = model.spec
        self.batch_invariant = False  # sharded models do not support batch invariance
        self.encode, self.forward, self.logits = model.encode, model.forward, model.logits
        self.capturable_encoder = getattr(model, "capturable_encoder", lambda largest: None)
        if hasattr(model, "encode_in_parts"):
            self.encode_in_parts = model.encode_in_parts

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(self._group.token_ids(input_ids))


class LeadingExecutor(TorchExecutor):
    """The TorchExecutor on rank 0 in a sharded model.

    `frames` collects the log frames that were committed since the last step. Set `frames` before the first
    step. The other ranks apply these frames and compute the same step.
    """

    frames: Tee

    def __init__(
        self,
        model: VisionLanguageModel,
        positions_of: PositionsOf,
        config: EngineConfig,
        placement: Placement,
        *args: Any,
        group: StepGroup,
        followers: Followers,
    ) -> None:
        later = msgspec.structs.replace(config, cuda_graphs=False)  # graphs are captured in `capture`
        super().__init__(LeadingModel(model, group), positions_of, later, placement, *args)
        self._runner.share_features = group.features
        self._recorder = recorder_for(config, placement.device)
        group.prepare(model.spec, placement, may_wait=config.max_in_flight > 1)
        self._group, self._followers = group, followers

    def capture(self, timeout_s: float) -> None:
        """Capture steps together with the other ranks. Raises ConfigError if a rank ends or times out."""
        capture_steps(
            self._runner, self._recorder, self._group, partial(self._followers.agree, timeout_s=timeout_s)
        )

    def dispatch(self, plan: StepPlan) -> None:
        self._followers.step(self.frames.take())
        super().dispatch(plan)

    def _run(self, step: InFlightStep) -> ComputedStep:
        with self._group.step(step.plan):
            return super()._run(step)

    def collect(self) -> StepResult:
        try:
            result = super().collect()
        except ExecutorLost as error:
            self._group.abort()
            if isinstance(error, GroupLost):
                self._followers.mark_lost(str(error))
                self._followers.check()
            raise
        self._followers.check()
        return result

    def _await(self, end: Event) -> None:
        """Wait for the step. Meanwhile, check that the other ranks are alive.

        A graph waits forever for exchanges with a dead rank, because NCCL's timeout does not cover graphs.
        Raises ExecutorLost if a rank is gone or the step exceeds the group's timeout, or ExecutorFailed if a
        rank reports an error.
        """
        begin = looked = time.monotonic()
        while not end.query():
            time.sleep(POLL_S)
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                self._followers.check()
                if now - begin > self._group.timeout_s:
                    raise GroupLost(f"a step took more than {self._group.timeout_s:g} seconds")

    def discard(self) -> None:
        """Drop the steps in flight. For a step that only the other ranks have begun, exchange zeros, so that
        these ranks do not wait.
        """
        begun = [(step.computed or step.launched or step.error) is not None for step in self._in_flight]
        waiting = [step for step, has_begun in zip(self._in_flight, begun, strict=True) if not has_begun]
        super().discard()
        try:
            for step in waiting:
                with self._group.step(step.plan):
                    pass  # leaving the context exchanges zeros
        except GroupLost as error:
            self._followers.mark_lost(str(error))

    def close(self) -> None:
        super().close()
        self._followers.close()
        self._group.close()

"""The torch executor: computes an engine's steps on a single device.

It implements the protocol Executor in core/executor.py.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mmengine.block_store.base import BlockStore
from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan, StepResult
from mmengine.errors import ExecutorFailed, ExecutorLost, MMEngineError
from mmengine.models.plugin import MediaInput, VisionLanguageModel
from mmengine.runtime.adapters import ReadAdapter
from mmengine.runtime.device.clock import LaunchClock, StepClock
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.port import Device, Event, Recorder
from mmengine.runtime.drafting.head.network import HeadNetwork
from mmengine.runtime.graphs.capture import recorder_for
from mmengine.runtime.kv.store_client import StoreClient
from mmengine.runtime.result_reader import ComputedStep, LaunchedStep
from mmengine.runtime.rows import PositionsOf
from mmengine.runtime.runner import ModelRunner
from mmengine.runtime.sampling.stops import StopWatcher
from mmengine.spec_decode.base import Drafter
from mmengine.structured_output.rows.rows import RowMatchers

_log = logging.getLogger("mmengine.runtime")  # printed to stderr unless the program configures logging


@dataclass(slots=True)
class InFlightStep:
    """A step that was dispatched and whose result was not collected yet.

    `pixels`: the pixels that the step encodes. The request may release its pixels before the step is
    collected. `computed`: the launched forward pass; None as soon as the sampling is launched too.
    `launched`: the whole launched step; None until the sampling is launched. `error`: the exception from a
    launch.
    """

    plan: StepPlan
    pixels: dict[str, Sequence[MediaInput]]
    computed: ComputedStep | None = None
    launched: LaunchedStep | None = None
    error: Exception | None = None
    start: Event | None = None
    end: Event | None = None
    # (block ids, KV) for blocks that were fetched from the block store
    fetched: Sequence[tuple[np.ndarray, torch.Tensor]] = ()


ON_CPU = Placement(CpuDevice(), torch.float32)


class TorchExecutor:
    """Computes steps on one device.

    On a CPU, `collect` computes the step. On an asynchronous device, `dispatch` launches the step, and
    `collect` waits until the step ends. The asynchronous path has not yet run on a GPU. With grammars or
    reasoning budgets, a step's sampling needs the previous step's tokens. `collect` then launches the
    sampling after reading the previous step.

    If a whole step fails, its `collect` raises an error. An MMEngineError is raised unchanged. Any other
    exception becomes ExecutorFailed, or ExecutorLost if the device no longer answers.
    """

    needs_plan = True

    def __init__(
        self,
        model: VisionLanguageModel,
        positions_of: PositionsOf,
        config: EngineConfig,
        placement: Placement = ON_CPU,
        stop_watcher: StopWatcher | None = None,
        matchers: RowMatchers | None = None,
        drafters: Sequence[Drafter] = (),
        head: HeadNetwork | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Build an executor for `model`.

        `positions_of`: the plugin's function `positions`. `config`: must have num_blocks and eos_token_ids.
        `placement`: must have the dtype of the model. `matchers`: the grammars of the rows; if None, requests
        with grammars fail. `drafters`: preferred drafters come first, and a drafter's index is its number in
        the log. `head`: a draft head, which is numbered after `drafters` and uses the model's block tables.
        `recorder`: captures decode-only steps and the encoder. By default it records CUDA graphs on a GPU,
        unless `config` disables them.

        Raises ConfigError if the KV pool cannot be allocated or the attention backend is unknown.
        """
        self._device = placement.device
        self._is_ahead = self._device.is_async
        recorder = recorder or recorder_for(config, self._device)
        self._runner = ModelRunner(
            model,
            positions_of,
            config,
            placement,
            stop_watcher,
            matchers,
            drafters,
            head,
            recorder,
        )
        self._in_flight: deque[InFlightStep] = deque()
        self._clock, self._launches = StepClock(), LaunchClock()

    @property
    def drafters(self) -> list[tuple[str, int]]:
        """The name and the failure count of each drafter, in the order of the drafter numbers in the log."""
        return self._runner.drafters

    @property
    def graph_counts(self) -> dict[str, dict[str, int]]:
        """For each kind of graph: the number of replays, and the number of runs without a replay by reason
        (see ModelRunner).
        """
        return self._runner.graph_counts

    def use_store(
        self, store: BlockStore, config: EngineConfig, fingerprints: Mapping[str, str]
    ) -> StoreClient:
        """Connect a block store for computed KV and encoder features.

        Returns the store's client, which the core uses.
        """
        return self._runner.use_store(store, config, fingerprints)

    def know_adapter(self, digest: bytes, read: ReadAdapter) -> None:
        """Register an adapter. `read` is called when a row first needs the adapter."""
        self._runner.adapters.register(digest, read)

    def forget_adapter(self, digest: bytes) -> None:
        """Forget an adapter that no request uses any more. An unknown digest is ignored."""
        self._runner.adapters.forget(digest)

    def attach(self, request_id: str, media: Sequence[MediaInput]) -> None:
        """Keep a request's pixels, one entry for each media item, until `release` is called.

        Call this method before a step encodes any of these items.
        """
        self._runner.attach(request_id, media)

    def release(self, request_id: str) -> None:
        """Release the pixels of a request. Unknown requests are ignored."""
        self._runner.release(request_id)

    def dispatch(self, plan: StepPlan) -> None:
        step = InFlightStep(plan, self._runner.pixels_of(plan))
        if plan.fetched:
            step.fetched = self._runner.take_fetched(plan)
        if self._is_ahead:
            if not self._in_flight:
                self._launches.launch()
            self._launch(step)
        self._in_flight.append(step)

    def _launch(self, step: InFlightStep) -> None:
        step.start, step.end = (self._device.event(timed=True) for _ in range(2))
        try:
            with self._device.current():  # CUDA has a current device for each thread
                step.start.record()
                self._begin(step)
        except Exception as error:  # `collect` raises the error for this step
            step.error = error

    def _begin(self, step: InFlightStep) -> None:
        """Launch the step. Also launch the sampling, unless it depends on tokens of a step in flight."""
        step.computed = self._run(step)
        if not (self._in_flight and step.computed.depends_on_sampled):
            self._sample(step)

    def _run(self, step: InFlightStep) -> ComputedStep:
        return self._runner.launch(step.plan, step.pixels, step.fetched)

    def _sample(self, step: InFlightStep) -> None:
        computed, step.computed = step.computed, None
        assert computed is not None
        step.launched = self._runner.sample(computed)
        if step.end is not None:
            step.end.record()

    def _sample_next(self) -> None:
        """Launch the next step's sampling, if it waited for the tokens that were just read."""
        step = self._in_flight[0] if self._in_flight else None
        if step is None or step.computed is None:
            return
        try:
            self._sample(step)
        except Exception as error:  # the next `collect` raises the error
            step.error = error

    def collect(self) -> StepResult:
        if not self._in_flight:
            raise ExecutorFailed("no step was dispatched, so there is no step to collect")
        step = self._in_flight.popleft()
        try:
            with self._device.current():
                result = self._finish(step)
                self._sample_next()
                return result
        except MMEngineError:
            raise
        except Exception as error:
            _log.error("step %d failed", step.plan.step, exc_info=error)
            raise _failure(step.plan, error, self._device) from error

    def _finish(self, step: InFlightStep) -> StepResult:
        if self._is_ahead:
            if step.error is not None:
                raise step.error
            assert step.launched is not None and step.start is not None and step.end is not None
            self._await(step.end)
            result = self._runner.finish(step.launched)
            # Drafts are computed after `step.end` was recorded, so their time is added.
            result.device_ns = int(step.start.elapsed_time(step.end) * 1e6) + result.draft_ns
            result.host_ns = max(0, self._launches.finish() - result.device_ns)
            return result
        host_ns = self._clock.lap()
        torch.get_num_threads()  # initialises the thread count of OpenMP, in case this thread is new
        result = self._runner.finish(self._runner.sample(self._run(step)))
        result.device_ns, result.host_ns = self._clock.lap(), host_ns
        return result

    def _await(self, end: Event) -> None:
        end.synchronize()

    def discard(self) -> None:
        """Forget all steps in flight. On a GPU they still finish, before any later work runs."""
        self._in_flight.clear()

    def close(self) -> None:
        """Drop the steps in flight, the pixels and the features, and free the KV blocks on a GPU.

        The executor must not be used afterwards.
        """
        self._in_flight.clear()
        self._runner.close()


def _failure(step: StepPlan, error: Exception, device: Device) -> ExecutorFailed:
    """Return the exception for a failed step: ExecutorLost if the device no longer answers."""
    # Only the first line of the message, because torch appends pages of text.
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if isinstance(error, torch.OutOfMemoryError):
        reason = (
            f"the memory of {device.name} is full ({reason}); lower num_blocks, token_budget or "
            "encoder_budget"
        )
    elif not device.answers():  # FlashInfer and Triton have no exception type for device errors
        return ExecutorLost(
            f"step {step.step} failed and the GPU no longer answers ({reason}); start the process "
            "again to resume all requests from the log; `nvidia-smi` and the kernel's log say more"
        )
    return ExecutorFailed(f"step {step.step} failed: {reason}")

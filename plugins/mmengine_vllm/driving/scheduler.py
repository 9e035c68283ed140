"""Implements vLLM's SchedulerInterface with mmengine's core: `--scheduler-cls mmengine_vllm.Scheduler`.

vLLM's loop calls `schedule`, which begins a step of the core. vLLM's workers then run the step, and
`update_from_output` finishes it. `update_draft_token_ids` then gets the drafts for the next step.
"""

import os
from collections import deque
from collections.abc import Iterable

import numpy as np
import vllm
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.utils import strip_speculative_padding

from mmengine.core.executor import StepPlan, StepResult
from mmengine.core.host_driven import RowDrivenCore
from mmengine.core.outputs import Outputs
from mmengine.errors import MMEngineError
from mmengine.events.log import LogWriter
from mmengine.events.sink import Sink
from mmengine_vllm.driving.outputs import OutputMaker
from mmengine_vllm.driving.requests import engine_request
from mmengine_vllm.driving.settings import engine_config
from mmengine_vllm.driving.step_results import StopRules
from mmengine_vllm.driving.worker_steps import WorkerSteps
from mmengine_vllm.log_files import free_folder
from mmengine_vllm.vllm_object import VllmObject

logger = init_logger("vllm.mmengine")
LOG = "MMENGINE_LOG"


class HostExecutor:
    """The core's executor. vLLM's workers execute the plans, and the Scheduler sets `result`."""

    needs_plan = True

    def __init__(self) -> None:
        self.plan: StepPlan | None = None  # a dispatched plan that the Scheduler has not taken yet
        self.result: StepResult | None = None  # the result of the oldest step

    def dispatch(self, plan: StepPlan) -> None:
        self.plan = plan

    def collect(self) -> StepResult:
        result, self.result = self.result, None
        assert result is not None  # the Scheduler calls finish_step only with a result
        return result

    def discard(self) -> None:
        self.plan = self.result = None

    def close(self) -> None:
        """Do nothing, because vLLM owns the workers."""


class Scheduler(SchedulerInterface):
    """mmengine's core as vLLM's scheduler. MMENGINE_LOG: the folder for the event log."""

    connector = ec_connector = None

    def __init__(
        self,
        vllm_config: VllmObject,
        kv_cache_config: VllmObject,
        structured_output_manager: VllmObject,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: VllmObject = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
        **unknown: VllmObject,
    ) -> None:
        self.kv_cache_config, self._manager, self._log_stats = (
            kv_cache_config,
            structured_output_manager,
            log_stats,
        )
        self._finished_by_client: dict[int, set[str]] | None = {} if include_finished_set else None
        sizes = _encoder_sizes(vllm_config, mm_registry)
        config = engine_config(vllm_config, kv_cache_config, block_size, sizes)
        self._executor = HostExecutor()
        host = f"vllm {vllm.__version__}"
        self.core = RowDrivenCore(config, self._executor, sink=_log(), fingerprints={"executor": host})
        self.requests: dict[str, VllmObject] = {}  # unfinished requests, by id
        self._steps = WorkerSteps(
            self.core.view,
            self.requests,
            resends_resumed=vllm_config.use_v2_model_runner,
            zeroes_blocks=kv_cache_config.needs_kv_cache_zeroing,
        )
        self._stops = StopRules(config.max_num_seqs, structured_output_manager.accept_tokens)
        self._outputs = OutputMaker(self.requests, self._steps.num_cached)
        self._plans: deque[tuple[StepPlan, list[str]]] = deque()  # dispatched steps: plan, request ids
        self._late = list[Outputs]()  # outputs that the core returned during `schedule`
        self._refused = list[EngineCoreOutput]()
        self._compiling: set[str] = set()  # ids of requests whose grammars are not ready
        self._pause = PauseState.UNPAUSED
        self._has_left = False  # whether requests were cancelled since the last step
        self._num_left_behind = 0  # how many dispatched steps may contain a cancelled request
        self._encoder_resets = 0
        self._num_preemptions = 0
        self._held = list[VllmObject]()  # requests that arrived while the scheduler was paused

    # Requests

    def add_request(self, request: VllmObject) -> None:
        if self._pause != PauseState.UNPAUSED:
            self._held.append(request)
            return
        try:
            self.core.submit(engine_request(request, self._encoder_resets))
        except MMEngineError as error:
            logger.error("request %s is refused: %s", request.request_id, error)
            self._refused.append((request.client_index, _refusal(request, str(error))))
            return
        self.requests[request.request_id] = request
        self._outputs.add(request)
        if request.use_structured_output:
            self._compiling.add(request.request_id)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: VllmObject
    ) -> list[VllmObject]:
        if request_ids is None:
            names = list(self.requests)
        else:
            names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        found = [self.requests[name] for name in names if name in self.requests]
        for request in found:
            request.status = finished_status
            self.core.cancel(request.request_id, _reason_of(finished_status))
            self._forget(request)
        self._has_left |= bool(found)
        if found:
            self._num_left_behind = len(self._plans)
        return found

    def has_request(self, request_id: str) -> bool:
        """Return whether the request is unfinished. vLLM 0.33 calls this method."""
        return request_id in self.requests

    def _forget(self, request: VllmObject) -> None:
        name = request.request_id
        self.requests.pop(name, None)
        self._compiling.discard(name)
        self._steps.forget(name)
        self._outputs.forget(name)
        if self._finished_by_client is not None:
            self._finished_by_client.setdefault(request.client_index, set()).add(name)

    # A step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._check_grammars()
        self._has_left = False
        if self._pause != PauseState.PAUSED_ALL:
            self._add_late(self.core.begin_step())
        plan, self._executor.plan = self._executor.plan, None
        if plan is not None and not len(plan.rows):  # all rows were preempted, so no worker runs
            self._executor.result = StepResult(np.zeros(0, np.int32))
            self._add_late(self.core.finish_step())
            plan = None
        if plan is None:
            return self._steps.empty()
        for admission in plan.admitted:
            self._stops.admit(admission.row, self.requests[admission.request.request_id])
        output = self._steps.output(plan, self._preempted())
        self._plans.append((plan, self._steps.names))
        return output

    def _add_late(self, outputs: Outputs) -> None:
        if outputs:
            self._late.append(outputs)

    def _check_grammars(self) -> None:
        for name in list(self._compiling):
            grammar = self.requests[name].structured_output_request.grammar
            if grammar is None:
                continue
            self._compiling.discard(name)
            if isinstance(grammar, Exception):
                self.core.grammar_failed(name, str(grammar))
            else:
                self.core.grammar_ready(name)

    def _preempted(self) -> list[str]:
        """Return the ids of the requests that this step preempted."""
        number = self.core.state.num_preempted
        if number == self._num_preemptions:
            return []
        self._num_preemptions = number
        waiting = self.core.view.requests
        return [name for name in self._steps.names if name in waiting and waiting[name].row < 0]

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not scheduler_output.has_structured_output_requests:
            return None
        plan, names = next(each for each in reversed(self._plans) if each[1])
        rows = [names[place] for place in plan.sample.tolist()]
        ids = [name for name in rows if name in self.requests and self.requests[name].use_structured_output]
        if not ids:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        mask = self._manager.grammar_bitmask(self.requests, ids, drafts)
        fields = GrammarOutput.__dataclass_fields__
        if "num_acceptable_drafts" not in fields:
            return GrammarOutput(ids, mask)
        lengths = [len(strip_speculative_padding(drafts.get(name, []))) for name in ids]
        return GrammarOutput(ids, mask, lengths)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: VllmObject
    ) -> dict[int, EngineCoreOutputs]:
        late, self._late = self._late, []
        made = [self._take_late(outputs) for outputs in late]
        if scheduler_output.total_num_scheduled_tokens:
            made.append(self._finish(model_runner_output))
        made += [{client: [output]} for client, output in self._refused]
        self._refused.clear()
        by_client = made[0] if made else {}
        for later in made[1:]:
            for client, of_client in later.items():
                by_client.setdefault(client, []).extend(of_client)
        answer = {client: EngineCoreOutputs(outputs=of_client) for client, of_client in by_client.items()}
        if self._log_stats:
            first = answer.setdefault(0, EngineCoreOutputs()) if not answer else next(iter(answer.values()))
            first.scheduler_stats = self.make_stats()
        if self._finished_by_client is not None:
            for client, finished in self._finished_by_client.items():
                answer.setdefault(client, EngineCoreOutputs()).finished_requests = finished
            self._finished_by_client = {}
        return answer

    def _finish(self, results: VllmObject) -> dict[int, list[EngineCoreOutput]]:
        """Pass the workers' results for the oldest step to the core, and return each client's outputs."""
        plan, names = self._plans.popleft()
        if len(plan.sample) < len(names):
            names = [names[place] for place in plan.sample.tolist()]
        if results.req_ids == names:
            sampled = results.sampled_token_ids.copy()
        else:
            places = map(results.req_id_to_index.__getitem__, names)
            sampled = list(map(results.sampled_token_ids.__getitem__, places))
        has_drafts = bool(self.core.config.num_draft_tokens)
        self._executor.result = self._stops.result(plan, self.requests, names, sampled, has_drafts)
        outputs = self.core.finish_step()
        may_have_left, self._num_left_behind = self._num_left_behind > 0, max(0, self._num_left_behind - 1)
        made = self._outputs.of_step(outputs, names, sampled, results, may_have_left=may_have_left)
        self._forget_ended(outputs)
        return made

    def _take_late(self, outputs: Outputs) -> dict[int, list[EngineCoreOutput]]:
        """Return each client's outputs that belong to no step (see OutputMaker.of_late)."""
        made = self._outputs.of_late(outputs)
        self._forget_ended(outputs)
        return made

    def _forget_ended(self, outputs: Outputs) -> None:
        for name in outputs.ends:
            if (request := self.requests.get(name)) is not None:
                self._forget(request)

    def update_draft_token_ids(self, draft_token_ids: VllmObject) -> None:
        view = self.core.view
        rows, counts, drafts = list[int](), list[int](), list[int]()
        for name, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request, state = self.requests.get(name), view.requests.get(name)
            if request is None or state is None or state.row < 0:
                continue
            if view.num_computed[state.row] != view.num_tokens[state.row] - 1:
                continue  # the prompt is not fully computed, so these drafts are meaningless
            tokens = self._manager.validate_tokens(request, list(tokens))
            rows.append(state.row)
            counts.append(len(tokens))
            drafts += tokens
        if rows:
            columns = (np.array(each, np.int32) for each in (rows, counts, drafts))
            self.core.propose(*columns)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: VllmObject, scheduler_output: SchedulerOutput
    ) -> None:
        raise NotImplementedError("drafts with asynchronous scheduling are refused when the scheduler starts")

    # State

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests) + len(self._refused) + len(self._held)

    def has_finished_requests(self) -> bool:
        return bool(self._steps.finished or self._has_left or any(self._late))

    @property
    def pause_state(self) -> PauseState:
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause = pause_state
        if pause_state == PauseState.UNPAUSED:
            held, self._held = self._held, []
            for request in held:
                self.add_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.core.reset_prefix_cache(preempt_running=reset_running_requests)
        return True

    def reset_encoder_cache(self) -> None:
        """Make later requests miss the encoder cache. Older entries stay until LRU eviction."""
        self._encoder_resets += 1

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.core.state.running), len(self.core.state.waiting)

    def get_kv_cache_usage(self) -> float:
        usable = self.core.config.num_blocks - 1
        return 1 - self.core.state.blocks.num_free / usable

    def make_stats(self, *args: VllmObject, **kwargs: VllmObject) -> SchedulerStats | None:
        running, waiting = self.get_request_counts()
        return SchedulerStats(
            num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=self.get_kv_cache_usage()
        )

    def shutdown(self) -> None:
        self.core.close()


def _encoder_sizes(vllm_config: VllmObject, mm_registry: VllmObject) -> tuple[int, int]:
    if not vllm_config.model_config.supports_multimodal_inputs:
        return 0, 0
    budget = MultiModalBudget(vllm_config, mm_registry)
    return budget.encoder_compute_budget, budget.encoder_cache_size


def _log() -> Sink | None:
    """Return a log writer for the folder MMENGINE_LOG, or None if the variable is not set. If the folder
    contains a log, the writer uses the next free folder.
    """
    if not (place := os.environ.get(LOG)):
        return None
    folder = free_folder(place)
    logger.info("mmengine decides and writes its log to %s (process %d)", folder, os.getpid())
    return LogWriter(folder)


def _reason_of(status: VllmObject) -> str:
    return "cancelled" if status == RequestStatus.FINISHED_ABORTED else f"vLLM: {status}"


def _refusal(request: VllmObject, why: str) -> EngineCoreOutput:
    return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=why)

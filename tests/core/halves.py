"""Drives an engine as a host such as vLLM does: separate calls begin and finish each step. The host proposes
drafts after the step's result.
"""

import random
from pathlib import Path

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan, StepResult
from mmengine.core.host_driven import HostDrivenCore
from mmengine.events.log import LogWriter
from mmengine.request import Request
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.workloads import check_invariants, small_config, small_request

EOS_IN = 7


class LateDrafts(SimulatedExecutor):
    """A simulated executor that returns a step's drafts only when the host asks."""

    def __init__(self, config: EngineConfig):
        super().__init__(config, eos_in=EOS_IN, check_kv=True)
        self.sampled = np.zeros(0, np.int32)
        self.kept: StepResult | None = None
        self.dispatched: list[StepPlan] = []

    def dispatch(self, plan: StepPlan) -> None:
        self.dispatched.append(plan)
        super().dispatch(plan)

    def collect(self) -> StepResult:
        plan = self.dispatched.pop(0)
        self.sampled, self.kept = plan.rows[plan.sample], super().collect()
        return msgspec.structs.replace(self.kept, drafts=None, num_drafts=None, drafters=None)

    def drafts(self, running: set[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the last step's drafts for rows that still run, as int32 arrays (rows, counts, drafts)."""
        result = self.kept
        assert result is not None and result.num_drafts is not None and result.drafts is not None
        keep = np.array([row in running for row in self.sampled.tolist()], bool)
        of_kept = np.repeat(keep, result.num_drafts)
        return self.sampled[keep], result.num_drafts[keep], result.drafts[of_kept]


def host_config(seed: int) -> EngineConfig:
    """Return a small config for a host-driven engine, with drafts only if steps do not overlap."""
    config = small_config(random.Random(seed))
    changes = {"draft_policy": "auto"} if config.max_in_flight == 1 else {"num_draft_tokens": 0}
    if config.max_in_flight > 1:
        changes["lookahead_tokens"] = 0
    return EngineConfig.from_dict(config.as_dict() | changes)


def run_in_halves(
    config: EngineConfig, seed: int, folder: Path, num_requests: int = 12
) -> list[tuple[list[int], bool, list[int]]]:
    """Run random requests and cancel some. Return (reference tokens, whether the answer is complete, tokens)
    for each request.
    """
    rng, executor = random.Random(seed), LateDrafts(config)
    core = HostDrivenCore(config, executor, sink=LogWriter(folder))
    tokens: dict[str, list[int]] = {}
    requests: dict[str, Request] = {}
    whole: set[str] = set()
    number = 0
    while number < num_requests or core.has_work:
        while number < num_requests and rng.random() < 0.4:
            request = small_request(rng, f"r{number}", config)
            number += 1
            if len(core.state.waiting) + len(core.inbox.queued) < config.max_waiting:
                core.submit(request)
                requests[request.request_id] = request
                tokens[request.request_id] = []
        if rng.random() < 0.1:
            core.cancel(f"r{rng.randrange(num_requests)}")
        outputs = list(core.begin_step())
        if len(executor.dispatched) == config.max_in_flight or executor.dispatched and rng.random() < 0.5:
            outputs += core.finish_step()
            running = {int(row) for row in core.state.running}
            if config.num_draft_tokens and executor.kept is not None and executor.kept.num_drafts is not None:
                core.propose(*executor.drafts(running))
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason in ("stop", "length"):
                whole.add(output.request_id)
        check_invariants(core.state)
    core.close()
    return [
        (reference_tokens(request, config, eos_in=EOS_IN)[0], name in whole, tokens[name])
        for name, request in requests.items()
    ]

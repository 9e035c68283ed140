"""Simulated runs that write a log, and record figures while they run."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.state.policy import Policy, register_policy
from mmengine.errors import QueueFull
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.request import PREFILL, Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import image, request, settings_of
from tests.core.workloads import ADAPTERS, small_request

EOS_IN = 20
SENDS_THE_FIRST_AWAY = Policy(lambda req_state: (-req_state.arrival,), lambda view: int(view.running[0]))


@dataclass
class Live:
    """The figures recorded during a run. `steps` has a tuple per step: (rows, tokens, admitted, encoded,
    running, waiting, free blocks, used encoder cache, error).
    """

    core: EngineCore | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)
    # Number of output tokens that each request already had at its arrival.
    given: dict[str, int] = field(default_factory=dict)
    ends: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[tuple] = field(default_factory=list)

    @property
    def queued(self) -> list[str]:
        """Return the ids of the accepted requests in their arrival order."""
        return [name for name in self.prompts if self.ends[name][0] != "rejected"]


class Watched(SimulatedExecutor):
    """A simulated executor that records each batch and the state when the batch is dispatched."""

    def __init__(self, live: Live, config, fail_at):
        super().__init__(config, eos_in=EOS_IN, fault=lambda step: "planted" if step in fail_at else None)
        self.live, self.fail_at = live, fail_at

    def dispatch(self, plan):
        state = self.live.core.state
        batch = (len(plan.rows), int(plan.num_scheduled.sum()), len(plan.admitted), len(plan.encode))
        pools = (state.blocks.num_free, state.encoder.used)
        error = "planted" if plan.step in self.fail_at else ""
        self.live.steps.append((*batch, len(state.running), len(state.waiting), *pools, error))
        super().dispatch(plan)


def busy_run(
    folder: Path, seed: int = 0, *, num_requests: int = 30, fail_at=(9, 10), mixed: bool = False, **settings
) -> Live:
    """Run requests of all kinds in a pool that is too small, write the log to `folder`, and return the
    recorded figures.

    The run has media, tenants, priorities, cancels, failed steps, grammars, a prefix cache reset and
    preemptions. With `mixed`, the run also has several samples for the same prompt, requests that arrive with
    output tokens, and grammars that take several steps to compile.
    """
    rng = random.Random(seed)
    values = {
        "max_num_seqs": 5,
        "token_budget": 24,
        "max_model_len": 48,
        "num_blocks": 19,
        "encoder_budget": 8,
        "encoder_cache_size": 12,
        "policy": "priority",
        "max_waiting": 6,
        "checkpoint_interval": 8,
        **settings,
    }
    config, live = settings_of(**values), Live()
    executor = Watched(live, config, fail_at)
    live.core = core = EngineCore(config, executor, sink=LogWriter(folder))
    request = None
    for number in range(num_requests):
        if config.max_loras and number < 2:
            core.inbox.put(ev.AdapterLoaded(ADAPTERS[number + 1], f"folder {number}"))
        if number == num_requests // 2:
            core.reset_prefix_cache()
            if config.max_loras:
                core.inbox.put(ev.AdapterUnloaded(ADAPTERS[1].name))
        request = small_request(rng, f"r{number}", config, grammars=0.2, like=request if mixed else None)
        if mixed and number % 4 == 3:
            most = request.budget(config.max_model_len) - 1
            request = replace(request, outputs=np.arange(min(most, number % 5), dtype=np.int32))
        try:
            core.submit(request)
        except QueueFull:
            _step(live, 3)
            continue
        if request.grammar is not None:
            ready = ev.GrammarReady(request.request_id)
            _step(live, 3 if mixed else 0)
            core.inbox.put(ready if rng.random() < 0.7 else ev.GrammarFailed(request.request_id, "planted"))
        live.tokens[request.request_id] = request.outputs.tolist()
        live.given[request.request_id] = len(request.outputs)
        live.prompts[request.request_id] = len(request.prompt_token_ids), len(request.media)
        if rng.random() < 0.2:
            core.cancel(f"r{rng.randrange(number + 1)}")
        _step(live, rng.randrange(4))
    while core.has_work:
        _step(live, 1)
    core.close()
    return live


def thrashing_core(folder: Path) -> EngineCore:
    """Return an engine with two requests that thrash. If blocks are missing, the policy preempts the first
    running request.
    """
    register_policy("sends the first away", SENDS_THE_FIRST_AWAY)
    config = EngineConfig(
        encoder_cache_size=64,
        max_num_seqs=2,
        token_budget=16,
        max_model_len=40,
        block_size=4,
        num_blocks=11,
        policy="sends the first away",
        admission_reserve="none",
        enable_prefix_caching=False,
        long_prefill_token_threshold=4,
        thrash_limit=3,
    )
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(folder))
    for name in ("first", "other"):
        prompt = np.full(36, len(name), np.int32)
        core.submit(Request(name, prompt, SamplingParams(max_tokens=3, seed=0)))
    return core


def _step(live: Live, count: int) -> None:
    for _ in range(count):
        for output in live.core.step():
            live.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                live.ends[output.request_id] = output.finish_reason, output.detail, output.num_cached_tokens
                live.core.delivered(output.request_id)


def session_run(folder: Path) -> EngineCore:
    """Run two sessions and another request that compete for blocks.

    The run has appended chunks, questions, a session that is truncated, and a closed session.
    """
    config = settings_of(num_blocks=25, session_blocks=12, checkpoint_interval=8)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(folder))
    core.sessions.open(ev.SessionOpened("one", envelope=b"kept", idle_ns=10**18))
    core.sessions.open(ev.SessionOpened("two", "tenant"))
    said = {"one": list(range(10, 24)), "two": list(range(50, 60))}

    def step_all():
        while core.has_work:
            for output in core.step():
                if output.finish_reason is not None:
                    core.delivered(output.request_id)

    def go_on(session, name, more, max_tokens=0, **place):
        said[session] = [*said[session], *more]
        sampling = SamplingParams(max_tokens=max_tokens, seed=1) if max_tokens else PREFILL
        media = (image(7, 2, 3),) if session == "one" else ()
        prompt = np.array(said[session], np.int32)
        salt = "tenant" if session == "two" else ""
        request = Request(name, prompt, sampling, media, cache_salt=salt)
        core.sessions.append(session, request, **place)
        step_all()
        said[session] = core.state.sessions.all[session].tokens.tolist()

    go_on("one", "one.0", [], num_opening=2, is_anchor=True)
    go_on("two", "two.0", range(60, 80))
    go_on("one", "one.1", range(30, 38), 5, num_opening=1)
    core.submit(request("others", 50, max_tokens=9))
    step_all()
    go_on("one", "one.2", [40, 41], 4)
    said["one"] = said["one"][:14]
    go_on("one", "one.3", range(70, 90))
    go_on("two", "two.1", [90], 3)
    core.sessions.close("two", "closed")
    step_all()
    core.close()
    return core

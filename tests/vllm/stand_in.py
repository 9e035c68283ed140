"""Stand-ins for the vLLM classes that mmengine_vllm.Scheduler uses. If vLLM is installed, tests use vLLM's
own classes.
"""

import importlib.util
import logging
import sys
from dataclasses import dataclass, field
from enum import IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any


class PauseState(IntEnum):
    UNPAUSED, PAUSED_NEW, PAUSED_ALL = 0, 1, 2


class FinishReason(IntEnum):
    STOP, LENGTH, ABORT, ERROR, REPETITION = 0, 1, 2, 3, 4


class RequestStatus(IntEnum):
    WAITING, FINISHED_STOPPED, FINISHED_ABORTED = auto(), auto(), auto()


class SchedulerInterface:
    """The concrete methods in vLLM's interface."""

    def has_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0 or self.has_finished_requests()


@dataclass
class CachedRequestData:
    req_ids: list = field(default_factory=list)
    resumed_req_ids: set = field(default_factory=set)
    new_token_ids: list = field(default_factory=list)
    all_token_ids: dict = field(default_factory=dict)
    new_block_ids: list = field(default_factory=list)
    num_computed_tokens: list = field(default_factory=list)
    num_output_tokens: list = field(default_factory=list)


@dataclass
class NewRequestData:
    req_id: str
    prompt_token_ids: list
    mm_features: list
    sampling_params: Any
    pooling_params: Any
    block_ids: tuple
    num_computed_tokens: int
    lora_request: Any
    prefill_token_ids: list | None = None


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict = field(default_factory=dict)
    scheduled_encoder_inputs: dict = field(default_factory=dict)
    finished_req_ids: set = field(default_factory=set)
    free_encoder_mm_hashes: list = field(default_factory=list)
    preempted_req_ids: set | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False

    @classmethod
    def make_empty(cls) -> "SchedulerOutput":
        return cls()


@dataclass
class GrammarOutput:
    structured_output_request_ids: list
    grammar_bitmask: Any


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list
    finish_reason: Any = None
    stop_reason: Any = None
    prefill_stats: Any = None
    trace_headers: Any = None


@dataclass
class EngineCoreOutputs:
    outputs: list = field(default_factory=list)
    scheduler_stats: Any = None
    finished_requests: set | None = None


@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0


class PrefillStats(SimpleNamespace):
    def set(self, **counts: int) -> None:
        self.__dict__.update(counts)


class MultiModalBudget:
    """Gives every configuration an encoder budget and an encoder cache, each with 64 embeddings."""

    encoder_compute_budget = encoder_cache_size = 64

    def __init__(self, vllm_config: Any, mm_registry: Any):
        """Ignore the configuration."""


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.0"},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.multimodal": {"MULTIMODAL_REGISTRY": None},
    "vllm.multimodal.encoder_budget": {"MultiModalBudget": MultiModalBudget},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.interface": {"PauseState": PauseState, "SchedulerInterface": SchedulerInterface},
    "vllm.v1.core.sched.output": {
        each.__name__: each for each in (CachedRequestData, NewRequestData, SchedulerOutput, GrammarOutput)
    },
    "vllm.v1.core.sched.utils": {"check_sequence_repetition": lambda tokens, params: False},
    "vllm.v1.engine": {each.__name__: each for each in (EngineCoreOutput, EngineCoreOutputs, FinishReason)},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.stats": {"PrefillStats": PrefillStats, "SchedulerStats": SchedulerStats},
    "vllm.v1.request": {"RequestStatus": RequestStatus},
    "vllm.v1.structured_output": {},
    "vllm.v1.structured_output.utils": {"strip_speculative_padding": lambda tokens: tokens},
}


def install(monkeypatch: Any) -> None:
    """Make the stand-ins importable as vLLM's modules until the test ends, if vLLM is not installed."""
    if importlib.util.find_spec("vllm.v1") is not None:
        return
    for name, members in MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("mmengine_vllm.driving")]:
        monkeypatch.delitem(sys.modules, name)
